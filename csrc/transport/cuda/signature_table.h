// Compares the call signatures of the ranks of a group. When a rank is ready to run a
// call site, or rejects its call, it sends its signature to all processes. Every
// process compares the signatures that it has received. No rank waits for the result.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jax_ub {

// The call that a rank makes at a call site. The ranks compare their signatures to
// detect that they make different calls.
struct GpuCallSignature {
  int rank = 0;
  std::string site = {};       // identifies the call site; the same on every rank
  std::string call = {};       // describes the call; must be the same on every rank
  std::string rejection = {};  // why the rank rejects the call; empty: it is ready

  bool operator==(const GpuCallSignature&) const = default;

  // Returns the part of a flag that identifies the call (flag_params.h). It is a hash
  // of `site` and `call`, and never 0. Two call sites have the same tag with
  // probability 2^-24. If ranks run two such calls in different orders, waits do not
  // detect it.
  uint32_t tag() const;

  // Encodes the signature as the text of a message to other processes.
  std::string Pack() const;
  // Decodes the text that Pack returned. Returns nullopt if the text is not valid.
  static std::optional<GpuCallSignature> Unpack(std::string_view packed);
};

class SignatureTable {
 public:
  explicit SignatureTable(int num_ranks) : num_ranks_(num_ranks) {}

  // Adds a signature, and compares it with the signatures of other ranks. For each call
  // site, the n-th signatures of all ranks are compared, in any order of arrival. Two
  // signatures contradict each other if they describe different calls, or if only one
  // of the two ranks rejects the call. Returns a signature that contradicts the new
  // one, or nullopt if there is none.
  std::optional<GpuCallSignature> Add(const GpuCallSignature& signature);

  // Returns the number of call sites for which some ranks have not sent their
  // signatures yet. Tests use it.
  int num_open() const { return static_cast<int>(open_.size()); }

 private:
  // The signatures of each rank that have not been compared with the signatures of all
  // other ranks yet. Indexed by rank.
  using PerRank = std::vector<std::deque<GpuCallSignature>>;

  const int num_ranks_;
  std::map<std::string, PerRank> open_;  // keyed by site
};

}  // namespace jax_ub
