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

// Reads attributes by name. Throws std::invalid_argument if one is missing or mistyped.
class AttributeSource {
 public:
  virtual ~AttributeSource() = default;
  virtual bool Has(const char* name) const = 0;
  virtual int64_t Integer(const char* name) const = 0;
  virtual float Float(const char* name) const = 0;
  virtual std::string Text(const char* name) const = 0;
  virtual std::vector<int64_t> Integers(const char* name) const = 0;
};

// Returns the names of the attributes that `op` has in addition to those of all ops.
std::vector<std::string_view> AttributeNames(const OpInfo& op);

// Reads and checks all attributes of `op`. Throws std::invalid_argument if a number is
// out of range or a required attribute is missing. The attributes of KernelOptions are
// optional.
CallAttributes ReadAttributes(Op op, const AttributeSource& source);

// Converts an array with these dimensions to [batch, rows, features]. For an
// all-reduce, all elements become features of one row, because the shape does not
// matter.
Tensor TensorOf(const CallAttributes& attributes,
                DType dtype,
                std::span<const int64_t> dimensions,
                void* data);

// Returns the names of the dtypes that calls take, from one column of the table of
// dtypes: "f32, bf16, f16".
std::string DTypeNames(const char* DTypeInfo::* column);

// Returns the prefix of an error message: "jax_ub.all_gather_matmul: attribute
// num_ranks: ".
std::string AttributeError(Op op, std::string_view name);

}  // namespace jax_ub
