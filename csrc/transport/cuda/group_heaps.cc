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

MulticastShape ShapeOf(Way way, const HeapLayout& layout, const Group& group) {
  MulticastShape shape;
  shape.num_devices = group.num_ranks();
  shape.heap_bytes = static_cast<size_t>(layout.size_bytes());
  if (group.num_processes() > 1) {
    shape.handle_types = way == Way::kVmm ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                          : CU_MEM_HANDLE_TYPE_FABRIC;
  }
  return shape;
}

}  // namespace

GroupHeaps GroupHeaps::InProcess(const Driver& driver,
                                 const std::vector<int>& ordinals,
                                 const HeapLayout& layout,
                                 const Group& group,
                                 bool nvls) {
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
  if (!nvls) return heaps;
  const std::string reason = heaps.BindHere(layout, group);
  if (!reason.empty()) heaps.step_downs_.push_back({kNvls, reason});
  return heaps;
}

GroupHeaps GroupHeaps::Shared(std::unique_ptr<OwnDevices> devices,
                              OwnHeaps own,
                              const Group& group,
                              const HeapLayout& layout,
                              const Agreement& agreement,
                              const std::map<int, Offer>& offers,
                              bool nvls,
                              Notes& notes,
                              const Deadline& deadline) {
  GroupHeaps heaps;
  heaps.devices_ = std::move(devices);
  heaps.own_ = std::move(own);
  std::vector<StepDown> failed;
  for (const Way way : agreement.ways) {
    std::string reason = heaps.ShareBy(way, group, layout, offers, notes, deadline);
    if (!reason.empty()) {
      failed.push_back({WayName(way), reason});
      continue;
    }
    heaps.how_ = WayName(way);
    heaps.step_downs_ = StepDownsTo(way, agreement, failed);
    heaps.FindPlaces(group);
    if (nvls) {
      reason = heaps.BindWithAll(way, group, layout, offers, notes, deadline);
      if (!reason.empty()) heaps.step_downs_.push_back({kNvls, reason});
    }
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
    others_[place] = PeerHeaps(*devices_, way, exported[place],
                               static_cast<int>(group.ranks_of(place).size()),
                               layout.size_bytes(), group.Describe(place, 0));
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

std::string GroupHeaps::BindHere(const HeapLayout& layout, const Group& group) {
  if (!own_.is_virtual()) return "the heaps are not virtual memory";
  if (devices_->devices().size() < static_cast<size_t>(group.num_ranks())) {
    return "several of its ranks have one GPU";
  }
  const std::string reason = WhyNoMulticast(*devices_);
  if (!reason.empty()) return reason;
  try {
    multicast_ = std::make_unique<Multicast>(
        Multicast::Create(devices_->driver(), ShapeOf(Way::kVmm, layout, group)));
    multicast_->Add(*devices_);
    multicast_->Bind(*devices_, own_);
    multicast_->Map(*devices_);
  } catch (const SystemError& error) {
    multicast_.reset();
    return error.what();
  }
  return "";
}

// Each step is taken by all, then all say how it went: whoever binds would block until all
// have added their devices, and nobody may use what is not bound everywhere.
std::string GroupHeaps::BindWithAll(Way way,
                                    const Group& group,
                                    const HeapLayout& layout,
                                    const std::map<int, Offer>& offers,
                                    Notes& notes,
                                    const Deadline& deadline) {
  std::vector<int> processes;
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    processes.push_back(group.numbers()[group.place_of_rank(rank)]);
  }
  std::string reason = WhyNoMulticast(way, processes, offers);
  if (!reason.empty()) return reason;
  const MulticastShape shape = ShapeOf(way, layout, group);
  std::vector<Note> told;
  const auto all_did = [&](const auto& step) {
    told = notes.Exchange(Attempt(step), deadline);
    reason = RefusalIn(group, told);
    if (!reason.empty()) multicast_.reset();
    return reason.empty();
  };
  const bool is_bound =
      all_did([&] {
        Note note;
        if (group.own() != 0) return note;
        multicast_ =
            std::make_unique<Multicast>(Multicast::Create(devices_->driver(), shape));
        note.text = ExportHandle(way, multicast_->object(), note.passed);
        return note;
      }) &&
      all_did([&] {
        if (group.own() != 0) {
          const std::string creator = group.Describe(0, 0);
          if (way == Way::kVmm && told[0].passed.size() != 1) {
            throw SystemError(creator + " passed no multicast object");
          }
          const FileDescriptor none;
          multicast_ = std::make_unique<Multicast>(Multicast::Import(
              shape,
              ImportHandle(devices_->driver(), way, told[0].text,
                           way == Way::kVmm ? told[0].passed[0] : none, creator)));
        }
        multicast_->Add(*devices_);
        return Note();
      }) &&
      all_did([&] {
        multicast_->Bind(*devices_, own_);
        multicast_->Map(*devices_);
        return Note();
      });
  return is_bound ? "" : reason;
}

void GroupHeaps::Abandon() {
  if (multicast_) multicast_->Abandon();
  own_.Abandon();
}

void GroupHeaps::GiveBack() {
  multicast_.reset();
  others_.clear();
  own_ = OwnHeaps();
}

}  // namespace jax_ub
