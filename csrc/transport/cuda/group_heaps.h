// The heaps of all ranks of a group, as one process reaches them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/deadline.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/multicast.h"
#include "transport/cuda/offer.h"
#include "transport/cuda/sharing.h"
#include "transport/process/group.h"
#include "transport/process/notes.h"

namespace jax_ub {

// With `nvls` a multicast object of all heaps comes on top, if that stands for all ranks;
// if not, for none, and that is one more step down.
class GroupHeaps {
 public:
  // `ordinals` [rank]. Throws UnsupportedError when a device cannot access another one.
  static GroupHeaps InProcess(const Driver& driver,
                              const std::vector<int>& ordinals,
                              const HeapLayout& layout,
                              const Group& group,
                              bool nvls);

  // Comes to the ways of `agreement`, one after the other, until all processes have
  // mapped all heaps by one. Throws UnsupportedError when none is left, and what Notes
  // throws. `offers` by process.
  static GroupHeaps Shared(std::unique_ptr<OwnDevices> devices,
                           OwnHeaps own,
                           const Group& group,
                           const HeapLayout& layout,
                           const Agreement& agreement,
                           const std::map<int, Offer>& offers,
                           bool nvls,
                           Notes& notes,
                           const Deadline& deadline);

  const OwnDevices& devices() const { return *devices_; }
  const std::string& how() const { return how_; }
  const std::vector<StepDown>& step_downs() const { return step_downs_; }
  int64_t size_bytes() const { return own_.size_bytes(); }
  // Of all ranks, for the device of the n-th own one.
  std::span<const RankPlace> places(int n) const { return places_[n]; }
  // What stands for the base of every heap, for all own devices; 0: nothing does.
  CUdeviceptr multicast() const { return multicast_ ? multicast_->base() : 0; }

  void GiveBack();
  // GiveBack will leave to the end of the process what a peer that still uses it could be
  // harmed without.
  void Abandon();

 private:
  GroupHeaps() = default;

  // Why this way is none, as the first process that cannot says; or "".
  std::string ShareBy(Way way,
                      const Group& group,
                      const HeapLayout& layout,
                      const std::map<int, Offer>& offers,
                      Notes& notes,
                      const Deadline& deadline);
  void Import(Way way,
              const Group& group,
              const HeapLayout& layout,
              const std::map<int, Offer>& offers,
              std::vector<Note>& exported);
  void FindPlaces(const Group& group);

  // Why there is no multicast, or "".
  std::string BindHere(const HeapLayout& layout, const Group& group);
  std::string BindWithAll(Way way,
                          const Group& group,
                          const HeapLayout& layout,
                          const std::map<int, Offer>& offers,
                          Notes& notes,
                          const Deadline& deadline);

  std::unique_ptr<OwnDevices> devices_;
  OwnHeaps own_;
  std::vector<PeerHeaps> others_;               // [place]
  std::unique_ptr<Multicast> multicast_;        // of all heaps
  std::vector<std::vector<RankPlace>> places_;  // [own rank][rank]
  std::string how_;
  std::vector<StepDown> step_downs_;
};

}  // namespace jax_ub
