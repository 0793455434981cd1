// Reads the attributes of a custom call, from XLA's dictionary in an FFI handler or
// from a Python dictionary during lowering.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/call.h"

namespace jax_ub {

// Reads attributes by name. Throws std::invalid_argument if an attribute is missing or
// has the wrong type.
class AttributeSource {
 public:
  virtual ~AttributeSource() = default;
  virtual bool Has(const char* name) const = 0;
  virtual int64_t Integer(const char* name) const = 0;
  virtual float Float(const char* name) const = 0;
  virtual std::string Text(const char* name) const = 0;
  virtual std::vector<int64_t> Integers(const char* name) const = 0;
};

// Returns the names of the attributes that `op` has, without those that all ops have.
std::vector<std::string_view> AttributeNames(const OpInfo& op);

// Reads and checks all attributes of `op`. Throws std::invalid_argument if a number is
// out of range or a required attribute is missing. Those of KernelOptions are optional.
CallAttributes ReadAttributes(Op op, const AttributeSource& source);

// Views an array as a tensor [batch, rows, features]. The last two dimensions of the
// array are rows and features, except in an all-reduce, where ranks may divide the array
// between any two elements: there a row has one element, or as many as the bias has.
Tensor TensorOf(const CallAttributes& attributes,
                DType dtype,
                std::span<const int64_t> dimensions,
                void* data);

// Returns the names of all supported dtypes, such as "f32, bf16, f16, ...", for error
// messages. `column` selects the name: &DTypeInfo::name or &DTypeInfo::numpy_name.
std::string DTypeNames(const char* DTypeInfo::* column);

// Returns the beginning of an error message, such as "jax_ub.all_gather_matmul:
// attribute num_ranks: ".
std::string AttributeError(Op op, std::string_view name);

}  // namespace jax_ub
