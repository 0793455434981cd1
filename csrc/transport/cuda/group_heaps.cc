#include "transport/cuda/group_heaps.h"

#include <algorithm>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// First character of a setup message that reports a failure.
constexpr char kRejected = '!';

// Returns the message that `function` returns or, if it throws a SystemError, a message
// that reports the error.
template <typename Function>
SetupMessage Attempt(const Function& function) {
  try {
    return function();
  } catch (const SystemError& error) {
    return {.text = kRejected + std::string(error.what()), .passed = {}};
  }
}

// Returns the failure that the first of the processes' messages reports, or "" if no
// message reports a failure. `messages` is indexed by process index.
std::string RejectionIn(const ProcessGroup& group,
                        const std::vector<SetupMessage>& messages) {
  for (size_t process_index = 0; process_index < messages.size(); ++process_index) {
    const std::string& text = messages[process_index].text;
    if (text.empty() || text[0] != kRejected) continue;
    return "process " + std::to_string(group.process_ids()[process_index]) + ": " +
           text.substr(1);
  }
  return "";
}

MulticastShape ShapeOf(SharingMode mode,
                       const HeapLayout& layout,
                       const ProcessGroup& group) {
  MulticastShape shape;
  shape.num_devices = group.num_ranks();
  shape.heap_bytes = static_cast<size_t>(layout.size_bytes());
  if (group.num_processes() > 1) {
    shape.handle_types = mode == SharingMode::kVmm
                             ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                             : CU_MEM_HANDLE_TYPE_FABRIC;
  }
  return shape;
}

}  // namespace

GroupHeaps GroupHeaps::InProcess(const Driver& driver,
                                 const std::vector<int>& ordinals,
                                 const HeapLayout& layout,
                                 const ProcessGroup& group,
                                 bool nvls) {
  GroupHeaps heaps;
  heaps.devices_ = std::make_unique<LocalDevices>(driver, ordinals);
  const std::string unreachable = heaps.devices_->UnreachableReason();
  if (!unreachable.empty())
    throw UnsupportedError("jax_ub." + group.name() + ": " + unreachable);
  try {
    heaps.own_ = LocalHeaps::Virtual(*heaps.devices_, layout.size_bytes(),
                                     CU_MEM_HANDLE_TYPE_NONE);
  } catch (const SystemError& error) {
    heaps.fallbacks_.push_back({SharingModeName(SharingMode::kVmm), error.what()});
    heaps.own_ = LocalHeaps::Allocated(*heaps.devices_, layout.size_bytes());
  }
  heaps.devices_->MakeRecords();
  heaps.sharing_mode_ = "in_process";
  heaps.others_.resize(1);
  heaps.FindAddresses(group);
  if (!nvls) return heaps;
  const std::string reason = heaps.BindHere(layout, group);
  if (!reason.empty()) heaps.fallbacks_.push_back({kNvls, reason});
  return heaps;
}

GroupHeaps GroupHeaps::Shared(std::unique_ptr<LocalDevices> devices,
                              LocalHeaps own,
                              const ProcessGroup& group,
                              const HeapLayout& layout,
                              const SharingDecision& decision,
                              const std::map<int, Capabilities>& capabilities_of,
                              bool nvls,
                              SetupExchange& exchange,
                              const Deadline& deadline) {
  GroupHeaps heaps;
  heaps.devices_ = std::move(devices);
  heaps.own_ = std::move(own);
  std::vector<SharingFallback> failed;
  for (const SharingMode mode : decision.modes) {
    std::string reason =
        heaps.ShareBy(mode, group, layout, capabilities_of, exchange, deadline);
    if (!reason.empty()) {
      failed.push_back({SharingModeName(mode), reason});
      continue;
    }
    heaps.sharing_mode_ = SharingModeName(mode);
    heaps.fallbacks_ = FallbacksTo(mode, decision, failed);
    heaps.FindAddresses(group);
    if (nvls) {
      reason =
          heaps.BindWithAll(mode, group, layout, capabilities_of, exchange, deadline);
      if (!reason.empty()) heaps.fallbacks_.push_back({kNvls, reason});
    }
    return heaps;
  }
  throw UnsupportedError("jax_ub." + group.name() + ": " +
                         RejectionOf(decision, failed));
}

std::string GroupHeaps::ShareBy(SharingMode mode,
                                const ProcessGroup& group,
                                const HeapLayout& layout,
                                const std::map<int, Capabilities>& capabilities_of,
                                SetupExchange& exchange,
                                const Deadline& deadline) {
  SetupMessage own = Attempt([&] {
    if (mode == SharingMode::kIpc && (own_.is_virtual() || !own_)) {
      own_ = LocalHeaps();
      own_ = LocalHeaps::Allocated(*devices_, layout.size_bytes());
    }
    return own_.Export(mode);
  });
  std::vector<SetupMessage> exported = exchange.Exchange(std::move(own), deadline);
  std::string reason = RejectionIn(group, exported);
  if (!reason.empty()) return reason;
  SetupMessage outcome = Attempt([&] {
    Import(mode, group, layout, capabilities_of, exported);
    return SetupMessage();
  });
  const bool is_rejected = !outcome.text.empty();
  reason = RejectionIn(group, exchange.Exchange(std::move(outcome), deadline));
  if (is_rejected || !reason.empty()) others_.clear();
  return reason;
}

void GroupHeaps::Import(SharingMode mode,
                        const ProcessGroup& group,
                        const HeapLayout& layout,
                        const std::map<int, Capabilities>& capabilities_of,
                        std::vector<SetupMessage>& exported) {
  others_ = std::vector<PeerHeaps>(group.num_processes());
  for (int process_index = 0; process_index < group.num_processes(); ++process_index) {
    if (process_index == group.own()) continue;
    // A process of another host has no connection to this process, so its handles are
    // in its capabilities.
    if (exported[process_index].text.empty()) {
      exported[process_index].text =
          capabilities_of.at(group.process_ids()[process_index])
              .at(SharingModeName(mode));
    }
    others_[process_index] =
        PeerHeaps(*devices_, mode, exported[process_index],
                  static_cast<int>(group.ranks_of(process_index).size()),
                  layout.size_bytes(), group.Describe(process_index, 0));
  }
}

void GroupHeaps::FindAddresses(const ProcessGroup& group) {
  for (int n = 0; n < devices_->num_ranks(); ++n) {
    std::vector<RankSlotAddress>& addresses =
        addresses_.emplace_back(group.num_ranks());
    for (int process_index = 0; process_index < group.num_processes();
         ++process_index) {
      const std::vector<int>& ranks = group.ranks_of(process_index);
      for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
        const CUdeviceptr base =
            process_index == group.own()
                ? own_.base(i)
                : others_[process_index].base(devices_->index_of(n), i);
        addresses[ranks[i]] = HeapLayout::AddressAt(base);
      }
    }
  }
}

std::string GroupHeaps::BindHere(const HeapLayout& layout, const ProcessGroup& group) {
  if (!own_.is_virtual()) return "the heaps are not virtual memory";
  if (devices_->devices().size() < static_cast<size_t>(group.num_ranks())) {
    return "several of its ranks have one GPU";
  }
  const std::string reason = WhyNoMulticast(*devices_);
  if (!reason.empty()) return reason;
  try {
    multicast_ = std::make_unique<Multicast>(Multicast::Create(
        devices_->driver(), ShapeOf(SharingMode::kVmm, layout, group)));
    multicast_->Add(*devices_);
    multicast_->Bind(*devices_, own_);
    multicast_->Map(*devices_);
  } catch (const SystemError& error) {
    multicast_.reset();
    return error.what();
  }
  return "";
}

// Binds the heaps of all processes to one multicast object, in several steps. After
// each step, the processes exchange its outcome. The exchange is also a barrier, which
// the driver requires: binding blocks until all devices have been added, and no device
// may use the object before all heaps are bound.
std::string GroupHeaps::BindWithAll(SharingMode mode,
                                    const ProcessGroup& group,
                                    const HeapLayout& layout,
                                    const std::map<int, Capabilities>& capabilities_of,
                                    SetupExchange& exchange,
                                    const Deadline& deadline) {
  std::vector<int> processes;
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    processes.push_back(group.process_ids()[group.process_index_of_rank(rank)]);
  }
  std::string reason = WhyNoMulticast(mode, processes, capabilities_of);
  if (!reason.empty()) return reason;
  const MulticastShape shape = ShapeOf(mode, layout, group);
  std::vector<SetupMessage> replies;
  const auto all_did = [&](const auto& step) {
    replies = exchange.Exchange(Attempt(step), deadline);
    reason = RejectionIn(group, replies);
    if (!reason.empty()) multicast_.reset();
    return reason.empty();
  };
  const bool is_bound =
      all_did([&] {
        SetupMessage message;
        if (group.own() != 0) return message;
        multicast_ =
            std::make_unique<Multicast>(Multicast::Create(devices_->driver(), shape));
        message.text = ExportHandle(mode, multicast_->object(), message.passed);
        return message;
      }) &&
      all_did([&] {
        if (group.own() != 0) {
          const std::string creator = group.Describe(0, 0);
          if (mode == SharingMode::kVmm && replies[0].passed.size() != 1) {
            throw SystemError(creator + " passed no multicast object");
          }
          const FileDescriptor none;
          multicast_ = std::make_unique<Multicast>(Multicast::Import(
              shape,
              ImportHandle(devices_->driver(), mode, replies[0].text,
                           mode == SharingMode::kVmm ? replies[0].passed[0] : none,
                           creator)));
        }
        multicast_->Add(*devices_);
        return SetupMessage();
      }) &&
      all_did([&] {
        multicast_->Bind(*devices_, own_);
        multicast_->Map(*devices_);
        return SetupMessage();
      });
  return is_bound ? "" : reason;
}

void GroupHeaps::FreeAtExit() {
  if (multicast_) multicast_->FreeAtExit();
  own_.FreeAtExit();
}

void GroupHeaps::Release() {
  multicast_.reset();
  others_.clear();
  own_ = LocalHeaps();
}

}  // namespace jax_ub
