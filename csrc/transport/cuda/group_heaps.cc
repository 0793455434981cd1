#include "transport/cuda/group_heaps.h"

#include <algorithm>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Begins what a process says that cannot do its part.
constexpr char kRefused = '!';

// What `function` returns for the others; or that it was refused, and why.
template <typename Function>
Note Attempt(const Function& function) {
  try {
    return function();
  } catch (const SystemError& error) {
    return {.text = kRefused + std::string(error.what()), .passed = {}};
  }
}

// The first refusal among the notes [place], or "".
std::string RefusalIn(const Group& group, const std::vector<Note>& notes) {
  for (size_t place = 0; place < notes.size(); ++place) {
    const std::string& text = notes[place].text;
    if (text.empty() || text[0] != kRefused) continue;
    return "process " + std::to_string(group.numbers()[place]) + ": " + text.substr(1);
  }
  return "";
}

}  // namespace

GroupHeaps GroupHeaps::InProcess(const Driver& driver,
                                 const std::vector<int>& ordinals,
                                 const HeapLayout& layout,
                                 const Group& group) {
  GroupHeaps heaps;
  heaps.devices_ = std::make_unique<OwnDevices>(driver, ordinals);
  const std::string apart = heaps.devices_->WhyApart();
  if (!apart.empty()) throw UnsupportedError("jax_ub." + group.name() + ": " + apart);
  try {
    heaps.own_ = OwnHeaps::Virtual(*heaps.devices_, layout.size_bytes(),
                                   CU_MEM_HANDLE_TYPE_NONE);
  } catch (const SystemError& error) {
    heaps.step_downs_.push_back({WayName(Way::kVmm), error.what()});
    heaps.own_ = OwnHeaps::Allocated(*heaps.devices_, layout.size_bytes());
  }
  heaps.devices_->MakeRecords();
  heaps.how_ = "in_process";
  heaps.others_.resize(1);
  heaps.FindPlaces(group);
  return heaps;
}

GroupHeaps GroupHeaps::Shared(std::unique_ptr<OwnDevices> devices,
                              OwnHeaps own,
                              const Group& group,
                              const HeapLayout& layout,
                              const Agreement& agreement,
                              const std::map<int, Offer>& offers,
                              Notes& notes,
                              const Deadline& deadline) {
  GroupHeaps heaps;
  heaps.devices_ = std::move(devices);
  heaps.own_ = std::move(own);
  std::vector<StepDown> failed;
  for (const Way way : agreement.ways) {
    const std::string reason =
        heaps.ShareBy(way, group, layout, offers, notes, deadline);
    if (!reason.empty()) {
      failed.push_back({WayName(way), reason});
      continue;
    }
    heaps.how_ = WayName(way);
    heaps.step_downs_ = StepDownsTo(way, agreement, failed);
    heaps.FindPlaces(group);
    return heaps;
  }
  throw UnsupportedError("jax_ub." + group.name() + ": " +
                         RefusalOf(agreement, failed));
}

std::string GroupHeaps::ShareBy(Way way,
                                const Group& group,
                                const HeapLayout& layout,
                                const std::map<int, Offer>& offers,
                                Notes& notes,
                                const Deadline& deadline) {
  Note own = Attempt([&] {
    if (way == Way::kIpc && (own_.is_virtual() || !own_)) {
      own_ = OwnHeaps();
      own_ = OwnHeaps::Allocated(*devices_, layout.size_bytes());
    }
    return own_.Export(way);
  });
  std::vector<Note> exported = notes.Exchange(std::move(own), deadline);
  std::string reason = RefusalIn(group, exported);
  if (!reason.empty()) return reason;
  Note outcome = Attempt([&] {
    Import(way, group, layout, offers, exported);
    return Note();
  });
  const bool is_refused = !outcome.text.empty();
  reason = RefusalIn(group, notes.Exchange(std::move(outcome), deadline));
  if (is_refused || !reason.empty()) others_.clear();
  return reason;
}

void GroupHeaps::Import(Way way,
                        const Group& group,
                        const HeapLayout& layout,
                        const std::map<int, Offer>& offers,
                        std::vector<Note>& exported) {
  others_ = std::vector<PeerHeaps>(group.num_processes());
  for (int place = 0; place < group.num_processes(); ++place) {
    if (place == group.own()) continue;
    // Another host's: what bootstrap brought.
    if (exported[place].text.empty()) {
      exported[place].text = offers.at(group.numbers()[place]).at(WayName(way));
    }
    others_[place] =
        PeerHeaps(*devices_, way, exported[place],
                  static_cast<int>(group.ranks_of(place).size()), layout.size_bytes());
  }
}

void GroupHeaps::FindPlaces(const Group& group) {
  for (int n = 0; n < devices_->num_ranks(); ++n) {
    std::vector<RankPlace>& places = places_.emplace_back(group.num_ranks());
    for (int place = 0; place < group.num_processes(); ++place) {
      const std::vector<int>& ranks = group.ranks_of(place);
      for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
        const CUdeviceptr base = place == group.own()
                                     ? own_.base(i)
                                     : others_[place].base(devices_->index_of(n), i);
        places[ranks[i]] = HeapLayout::PlaceAt(base);
      }
    }
  }
}

void GroupHeaps::GiveBack() {
  others_.clear();
  own_ = OwnHeaps();
}

}  // namespace jax_ub
