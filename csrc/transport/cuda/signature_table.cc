#include "transport/cuda/signature_table.h"

#include <algorithm>
#include <charconv>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

namespace {

bool Contradict(const GpuCallSignature& one, const GpuCallSignature& other) {
  return one.call != other.call || one.refusal.empty() != other.refusal.empty();
}

}  // namespace

// FNV-1a, folded from 64 to 24 bits.
uint32_t GpuCallSignature::tag() const {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](char byte) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  };
  for (const char byte : site) add(byte);
  add('\0');
  for (const char byte : call) add(byte);
  hash ^= hash >> 48 ^ hash >> 24;
  return std::max<uint32_t>(hash & kTagMask, 1);
}

// The refusal comes last, because SendMessage truncates messages that are too long.
std::string GpuCallSignature::Pack() const {
  std::string packed = std::to_string(rank);
  for (const std::string* text : {&site, &call, &refusal}) {
    packed += '\0';
    packed += *text;
  }
  return packed;
}

std::optional<GpuCallSignature> GpuCallSignature::Unpack(std::string_view packed) {
  GpuCallSignature statement;
  std::string number;
  for (std::string* text : {&number, &statement.site, &statement.call}) {
    const size_t end = packed.find('\0');
    if (end == std::string_view::npos) return std::nullopt;
    *text = packed.substr(0, end);
    packed.remove_prefix(end + 1);
  }
  statement.refusal = packed;
  const char* const end = number.data() + number.size();
  const auto read = std::from_chars(number.data(), end, statement.rank);
  if (read.ec != std::errc() || read.ptr != end) return std::nullopt;
  return statement;
}

std::optional<GpuCallSignature> SignatureTable::Add(const GpuCallSignature& statement) {
  PerRank& per_rank = open_.try_emplace(statement.site, num_ranks_).first->second;
  std::deque<GpuCallSignature>& own = per_rank[statement.rank];
  const size_t n = own.size();
  own.push_back(statement);
  std::optional<GpuCallSignature> found;
  for (const std::deque<GpuCallSignature>& said : per_rank) {
    if (said.size() > n && Contradict(said[n], statement)) {
      found = said[n];
      break;
    }
  }
  const auto has_spoken = [](const auto& said) { return !said.empty(); };
  if (std::all_of(per_rank.begin(), per_rank.end(), has_spoken)) {
    for (std::deque<GpuCallSignature>& said : per_rank) said.pop_front();
    if (std::none_of(per_rank.begin(), per_rank.end(), has_spoken)) {
      open_.erase(statement.site);
    }
  }
  return found;
}

}  // namespace jax_ub
