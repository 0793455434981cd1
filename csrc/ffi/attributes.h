// Reads the attributes of a custom call. An FFI handler reads them from XLA's
// dictionary, and the lowering reads them from a Python dictionary.
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

// Returns the names of the attributes of `op`, except the attributes that all ops have.
std::vector<std::string_view> AttributeNames(const OpInfo& op);

// Reads and checks all attributes of `op`. Throws std::invalid_argument if a number is
// out of range or a required attribute is missing. The attributes of KernelOptions are
// optional.
CallAttributes ReadAttributes(Op op, const AttributeSource& source);

// Views an array as a tensor [batch, rows, features], where rows and features are the
// last two dimensions of the array. In an all-reduce, ranks may divide the array
// between any two elements. There, a row has one element or, with a bias, as many
// elements as the bias.
Tensor TensorOf(const CallAttributes& attributes,
                DType dtype,
                std::span<const int64_t> dimensions,
                void* data);

// Returns the names of all supported dtypes for an error message, such as "f32, bf16,
// f16, ...". `column` selects the name: &DTypeInfo::name or &DTypeInfo::numpy_name.
std::string DTypeNames(const char* DTypeInfo::* column);

// Returns the beginning of an error message, such as "jax_ub.all_gather_matmul:
// attribute num_ranks: ".
std::string AttributeError(Op op, std::string_view name);

}  // namespace jax_ub
