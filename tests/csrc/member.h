// A test process of a group that spans several processes, with an engine and a
// communicator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine/cpu/engine.h"
#include "engine_calls.h"
#include "processes.h"

namespace jax_ub {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

// A test process of a group, in which rank r is on device 100 + r.
class Member {
 public:
  Member(int process,
         Bulletin& bulletin,
         const std::vector<int>& process_of_rank,
         double timeout_s = kLongS,
         int64_t buffer_bytes = 1 << 20,
         double first_call_timeout_s = 0)
      : engine_(NewEngine(timeout_s, 1, first_call_timeout_s)) {
    std::vector<int64_t> devices;
    std::vector<int64_t> local;
    for (size_t r = 0; r < process_of_rank.size(); ++r) {
      devices.push_back(100 + static_cast<int64_t>(r));
      if (process_of_rank[r] == process) local.push_back(devices.back());
    }
    engine_.rendezvous().set_local_devices(local);
    sequencer_ = engine_.Join(
        ConnectAs(process, bulletin, process_of_rank, buffer_bytes), devices,
        /*generation=*/2);
  }
  ~Member() { Leave(); }

  void Leave() { engine_.Leave(sequencer_); }

  Engine& engine() { return engine_; }
  CallSequencer& sequencer() { return *sequencer_; }
  const std::vector<int>& ranks() const { return sequencer_->local_ranks(); }

  // Submits the calls of the local ranks.
  std::vector<Outcome> Begin(CallSite& site,
                             int64_t run_id,
                             const std::vector<RankCall>& calls) {
    std::vector<Outcome> outcomes;
    for (const int rank : ranks()) {
      outcomes.push_back(Submit(engine_, site, run_id, 100 + rank, calls[rank]));
    }
    return outcomes;
  }

  void CheckRun(CallSite& site, int64_t run_id, const Sizes& sizes, int seed) {
    Arrays arrays(seed);
    const auto calls = MakeCalls(site.attributes(), sizes, arrays);
    for (Outcome& outcome : Begin(site, run_id, calls)) CHECK_EQ(outcome.Wait(), "");
    CHECK_EQ(NumWrong(site.attributes(), calls, ranks()), 0);
  }

 private:
  Engine& engine_;
  std::shared_ptr<CallSequencer> sequencer_;
};

inline CallAttributes Spanning(Op op, Method method, size_t num_ranks) {
  CallAttributes at = MakeAttributes(op, method, static_cast<int>(num_ranks));
  at.channel = "jit_test/1";
  return at;
}

// Runs `function(member)` in every process.
template <typename Function>
void InProcesses(const std::vector<int>& process_of_rank,
                 const Function& function,
                 double timeout_s = kLongS,
                 int64_t buffer_bytes = 1 << 20) {
  Bulletin bulletin;
  const int num_processes =
      *std::max_element(process_of_rank.begin(), process_of_rank.end()) + 1;
  Processes processes(num_processes, [&](int process) {
    Member member(process, bulletin, process_of_rank, timeout_s, buffer_bytes);
    function(member);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace jax_ub
