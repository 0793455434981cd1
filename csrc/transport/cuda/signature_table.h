// Compares the call signatures of the ranks of a group. Each rank sends its signature
// of a call site to all processes when it is ready to run it or rejects it. Every
// process compares the signatures that it has received, and no rank waits for the
// result.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jax_ub {

// The call that a rank makes at a call site. Ranks exchange their signatures to detect
// calls that do not match.
struct GpuCallSignature {
  int rank = 0;
  std::string site = {};       // identifies the call site; the same on every rank
  std::string call = {};       // describes the call; must be the same on every rank
  std::string rejection = {};  // why the rank rejects the call; empty: it is ready

  bool operator==(const GpuCallSignature&) const = default;

  // Returns the part of a flag that identifies the call (flag_params.h): a hash of
  // `site` and `call` that is never 0. Two call sites have the same tag with
  // probability 2^-24; waits then do not detect ranks that make these two calls in
  // different order.
  uint32_t tag() const;

  // Serializes the signature for a message.
  std::string Pack() const;
  // Deserializes a signature. Returns nullopt if `packed` is not one.
  static std::optional<GpuCallSignature> Unpack(std::string_view packed);
};

class SignatureTable {
 public:
  explicit SignatureTable(int num_ranks) : num_ranks_(num_ranks) {}

  // Adds a signature and compares it with the signatures of the other ranks. The n-th
  // signatures of all ranks for a site are compared with each other, in any order of
  // arrival. Returns a signature that contradicts it, if any: it describes a different
  // call, or one of the two ranks is ready and the other one rejects the call. If all
  // ranks reject the call, there is no contradiction.
  std::optional<GpuCallSignature> Add(const GpuCallSignature& signature);

  // For tests: returns the number of sites for which some rank's signature is still
  // missing. Signatures are removed when all ranks have sent theirs.
  int num_open() const { return static_cast<int>(open_.size()); }

 private:
  // Indexed by rank: the signatures of a rank that wait for another rank's signature,
  // with which they will be compared.
  using PerRank = std::vector<std::deque<GpuCallSignature>>;

  const int num_ranks_;
  std::map<std::string, PerRank> open_;  // keyed by site
};

}  // namespace jax_ub
