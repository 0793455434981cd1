#include "transport/cuda/signature_table.h"

#include <algorithm>
#include <charconv>

#include "platform/hash.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

namespace {

bool Contradict(const GpuCallSignature& one, const GpuCallSignature& other) {
  return one.call != other.call || one.rejection.empty() != other.rejection.empty();
}

}  // namespace

// Returns a hash of the call site and the call: FNV-1a, reduced to 24 bits.
uint32_t GpuCallSignature::tag() const {
  uint64_t hash = Mix(Mix(Mix(kHashBegin, site), uint64_t{0}), call);
  hash ^= hash >> 48 ^ hash >> 24;
  return std::max<uint32_t>(hash & kTagMask, 1);
}

// The rejection is the last part. SendMessage cuts the end of long messages, and an
// incomplete rejection is harmless.
std::string GpuCallSignature::Pack() const {
  std::string packed = std::to_string(rank);
  for (const std::string* text : {&site, &call, &rejection}) {
    packed += '\0';
    packed += *text;
  }
  return packed;
}

std::optional<GpuCallSignature> GpuCallSignature::Unpack(std::string_view packed) {
  GpuCallSignature signature;
  std::string number;
  for (std::string* text : {&number, &signature.site, &signature.call}) {
    const size_t end = packed.find('\0');
    if (end == std::string_view::npos) return std::nullopt;
    *text = packed.substr(0, end);
    packed.remove_prefix(end + 1);
  }
  signature.rejection = packed;
  const char* const end = number.data() + number.size();
  const auto read = std::from_chars(number.data(), end, signature.rank);
  if (read.ec != std::errc() || read.ptr != end) return std::nullopt;
  return signature;
}

std::optional<GpuCallSignature> SignatureTable::Add(const GpuCallSignature& signature) {
  PerRank& per_rank = open_.try_emplace(signature.site, num_ranks_).first->second;
  std::deque<GpuCallSignature>& own = per_rank[signature.rank];
  const size_t n = own.size();
  own.push_back(signature);
  std::optional<GpuCallSignature> found;
  for (const std::deque<GpuCallSignature>& said : per_rank) {
    if (said.size() > n && Contradict(said[n], signature)) {
      found = said[n];
      break;
    }
  }
  const auto has_spoken = [](const auto& said) { return !said.empty(); };
  if (std::all_of(per_rank.begin(), per_rank.end(), has_spoken)) {
    for (std::deque<GpuCallSignature>& said : per_rank) said.pop_front();
    if (std::none_of(per_rank.begin(), per_rank.end(), has_spoken)) {
      open_.erase(signature.site);
    }
  }
  return found;
}

}  // namespace jax_ub
