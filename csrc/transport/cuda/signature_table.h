// What the ranks of a group say of each call site when they are ready for it, or refuse it:
// whoever hears both sides sees whether they agree. Nobody waits for anybody.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jax_ub {

// What a rank says.
struct GpuCallSignature {
  int rank = 0;
  std::string site = {};     // names the call site alike on every rank
  std::string call = {};     // what it means by it, in words: alike on every rank
  std::string refusal = {};  // why it cannot run it; empty: it is ready

  bool operator==(const GpuCallSignature&) const = default;

  // What flags carry of the call (flag_params.h): a hash of `site` and `call`, never 0. Of
  // two call sites one pair in 2^24 has the same one, and of these the order is not checked.
  uint32_t tag() const;

  // For a message, and back; nothing of what is no statement.
  std::string Pack() const;
  static std::optional<GpuCallSignature> Unpack(std::string_view packed);
};

class SignatureTable {
 public:
  explicit SignatureTable(int num_ranks) : num_ranks_(num_ranks) {}

  // The n-th statement of a rank on a site belongs to the n-th of each other rank. Returns
  // one that contradicts it: of another call; or of one who is ready while this one is not,
  // or the other way round. That all refuse is none.
  std::optional<GpuCallSignature> Add(const GpuCallSignature& statement);

  // For tests: sites on which not every rank has said the same number of statements. What
  // all have answered is forgotten.
  int num_open() const { return static_cast<int>(open_.size()); }

 private:
  using PerRank =
      std::vector<std::deque<GpuCallSignature>>;  // [rank]: not answered by all

  const int num_ranks_;
  std::map<std::string, PerRank> open_;  // by site
};

}  // namespace jax_ub
