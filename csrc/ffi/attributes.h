// What a custom call says of itself, wherever it is read from: XLA's dictionary in a
// handler, or Python's while a program is lowered.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/call.h"

namespace jax_ub {

// Attributes by name; each throws std::invalid_argument where there is none of the type.
class AttributeSource {
 public:
  virtual ~AttributeSource() = default;
  virtual bool Has(const char* name) const = 0;
  virtual int64_t Integer(const char* name) const = 0;
  virtual float Float(const char* name) const = 0;
  virtual std::string Text(const char* name) const = 0;
  virtual std::vector<int64_t> Integers(const char* name) const = 0;
};

// Throws std::invalid_argument for a number that is out of range. The attributes of
// Tuning may be missing.
CallAttributes ReadAttributes(Op op, const AttributeSource& source);

// An array of these dimensions, as the op sees it.
Tensor TensorOf(const CallAttributes& attributes,
                DType dtype,
                std::span<const int64_t> dimensions,
                void* data);

// "jax_ub.all_gather_matmul: attribute num_ranks: "
std::string AttributeError(Op op, std::string_view name);

}  // namespace jax_ub
