// Plants errors in the programs of the ranks. The search of protocol_test.cc finds them.

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/protocol_search.h"

namespace jax_ub {

// Makes a wait end at once, because its condition always holds.
void Forget(Operation& wait) {
  WaitParams& params = ParamsOf<WaitParams>(wait);
  for (AwaitedFlag& flag : params.flags) flag.flag = params.waiting.own.epoch;
  params.ahead = 0;
}

void ForgetFreed(RankProgram& program) {
  for (Operation& operation : program.lane) {
    if (!IsKernel(operation, kWaitKernel)) continue;
    if (ParamsOf<WaitParams>(operation).ahead == 0) Forget(operation);
  }
}

// Removes the waits for peers' flags before the sums, or before they are copied out.
void ForgetBarrier(RankProgram& program, bool before_sums) {
  const Operation* next = nullptr;  // that uses slots
  for (size_t i = program.lane.size(); i-- > 0;) {
    Operation& operation = program.lane[i];
    if (operation.uses_slots()) next = &operation;
    if (next == nullptr || !IsKernel(operation, kWaitKernel)) continue;
    const bool is_last = !IsKernel(*next, kMulticastSumKernel);
    if (ParamsOf<WaitParams>(operation).ahead == 1 && is_last != before_sums) {
      Forget(operation);
    }
  }
}

// Checks that the search finds an error in three calls of each kind after the change.
void ExpectFound(const std::string& text,
                 const Change& change,
                 const std::vector<Kind>& kinds = Kinds(Reduction::kSchedule),
                 Search search = Search::kEager) {
  for (const Kind& kind : kinds) {
    const std::string wrong =
        Explore({kind, kind, kind}, 2, kUnsignedWrap, search, change);
    if (wrong.find(text) != std::string::npos) continue;
    check::Fail(__FILE__, __LINE__, Describe({kind}, 2), ": found '", wrong, "', not '",
                text, "'");
  }
}

TEST(not_waiting_for_freed_is_found) { ExpectFound("reads piece", ForgetFreed); }

TEST(ending_a_call_without_freeing_is_found) {
  ExpectFound("waits for ever", [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (IsKernel(operation, kEndKernel)) {
        ParamsOf<EndParams>(operation).freed.num_targets = 0;
      }
    }
  });
}

// The rank also frees the next call's slots, before it has begun. Excluded are the two
// stages of an all-reduce in a ring of two, which wait for each other anyway.
TEST(counting_the_epoch_before_freeing_is_found) {
  std::vector<Kind> kinds = Kinds(Reduction::kSchedule);
  std::erase_if(kinds, [](const Kind& kind) {
    return kind.collective == CollectiveKind::kMatmulAllReduce &&
           kind.method == Method::kRingExchange && kind.variant == Variant::kPlain;
  });
  const Change change = [](RankProgram& program) {
    for (size_t i = 0; i < program.lane.size(); ++i) {
      if (!IsKernel(program.lane[i], kEndKernel)) continue;
      EndParams& end = ParamsOf<EndParams>(program.lane[i]);
      const SignalParams freed = {end.own, end.tag, end.freed};
      end.freed.num_targets = 0;
      Operation signal;
      signal.kernel = FindEmulatedKernel(kSignalKernel);
      signal.params.resize(sizeof freed);
      std::memcpy(signal.params.data(), &freed, sizeof freed);
      program.lane.insert(program.lane.begin() + ++i, signal);
      for (ConcurrentWork& read : program.concurrent) read.after += read.after >= i;
    }
  };
  ExpectFound("waits for ever", change, kinds);
}

TEST(ending_a_call_before_its_slots_are_read_is_found) {
  ExpectFound("reads piece", [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (IsKernel(operation, kEndKernel)) operation.needs = 0;
    }
  });
}

TEST(signalling_before_writing_is_found) {
  ExpectFound("reads piece", SignalBeforeWriting);
}

void WaitForTheCallBefore(RankProgram& program) {
  for (Operation& operation : program.lane) {
    if (IsKernel(operation, kWaitKernel)) ParamsOf<WaitParams>(operation).ahead = 0;
  }
}

TEST(waiting_for_the_call_before_is_found) {
  ExpectFound("reads piece", WaitForTheCallBefore);
}

TEST(summing_by_multicast_before_all_have_their_parts_is_found) {
  const Change change = [](RankProgram& program) { ForgetBarrier(program, true); };
  ExpectFound("reads piece", change, Kinds(Reduction::kMulticast));
}

TEST(a_reduction_by_multicast_without_its_last_barrier_is_found) {
  const Change change = [](RankProgram& program) { ForgetBarrier(program, false); };
  ExpectFound("reads piece", change, Kinds(Reduction::kMulticast));
}

TEST(signalling_before_the_product_is_there_is_found) {
  std::vector<Kind> kinds = Kinds(Reduction::kMulticast);
  std::erase_if(
      kinds, [](const Kind& k) { return k.collective == CollectiveKind::kAllReduce; });
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) operation.needs = 0;
  };
  ExpectFound("reads piece", change, kinds);
}

TEST(what_else_is_found_of_schedules_is_found_of_reductions_by_multicast) {
  ExpectFound("reads piece", SignalBeforeWriting, Kinds(Reduction::kMulticast));
  ExpectFound("reads piece", WaitForTheCallBefore, Kinds(Reduction::kMulticast));
}

// In the ring before it, the previous rank sets all flags; here each peer has its own.
TEST(a_reduction_by_multicast_that_does_not_wait_for_freed_is_found) {
  const std::vector<Kind> calls = {kKinds[0], Kinds(Reduction::kMulticast)[0]};
  CHECK_EQ(Explore(calls, 3, kUnsignedWrap, Search::kEager), "");
  CHECK(!Explore(calls, 3, kUnsignedWrap, Search::kEager, ForgetFreed).empty());
}

// Removes the waits of a kernel that all-reduces: for free slots, or for partial sums.
void ForgetPhase(RankProgram& program, std::string_view phase) {
  for (Operation& operation : program.lane) {
    if (!IsKernel(operation, phase)) continue;
    AllReduceParams& params = ParamsOf<AllReduceParams>(operation);
    params.num_peers = 0;
  }
}

TEST(an_all_reduce_by_one_kernel_without_a_wait_is_found) {
  for (const char* phase : {kAwaitFreePhase, kAwaitPhase}) {
    const Change change = [&](RankProgram& program) { ForgetPhase(program, phase); };
    ExpectFound("reads piece", change, Kinds(Reduction::kOneKernel));
  }
}

TEST(an_all_reduce_by_one_kernel_that_signals_before_it_pushes_is_found) {
  const Change change = [](RankProgram& program) {
    for (size_t i = 1; i < program.lane.size(); ++i) {
      if (IsKernel(program.lane[i], kSignalPhase)) {
        std::swap(program.lane[i - 1], program.lane[i]);
      }
    }
  };
  ExpectFound("reads piece", change, Kinds(Reduction::kOneKernel));
}

// Of three consecutive calls, the peers may still read the slots of the second one.
TEST(an_all_reduce_by_one_kernel_that_pushes_after_a_failure_is_found) {
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (!IsAllReduce(operation)) continue;
      ParamsOf<AllReduceParams>(operation).waiting.poisons.num_peers = 0;
      if (operation.uses_slots()) operation.kernel = nullptr;
    }
  };
  ExpectFound("has not failed", change, Kinds(Reduction::kOneKernel),
              Search::kFailures);
}

void ForgetTags(RankProgram& program) {
  for (Operation& operation : program.lane) {
    if (IsKernel(operation, kWaitKernel)) {
      ParamsOf<WaitParams>(operation).waiting.tag = 1;
    } else if (IsAllReduce(operation)) {
      ParamsOf<AllReduceParams>(operation).waiting.tag = 1;
    } else if (IsKernel(operation, kSignalKernel)) {
      ParamsOf<SignalParams>(operation).tag = 1;
    } else if (IsKernel(operation, kEndKernel)) {
      ParamsOf<EndParams>(operation).tag = 1;
    }
  }
}

// Without comparison, ranks end both calls with data of the wrong call.
TEST(not_comparing_tags_is_found) {
  for (const Kind& kind : kKinds) {
    if (kind.num_splits > 1) continue;
    const std::string wrong = ExploreOrders({kind, kind}, {{0, 1}, {1, 0}}, ForgetTags);
    CHECK(wrong.ends_with("has not failed, and read another piece than it means"));
  }
}

// Without announcements, ranks wait for flags that their peers do not set in the other
// call.
TEST(not_announcing_calls_is_found) {
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      static uint64_t nowhere = 0;
      if (IsKernel(operation, kWaitKernel)) {
        ParamsOf<WaitParams>(operation).announcements.num_peers = 0;
      } else if (IsAllReduce(operation)) {
        for (AllReducePeer& peer : ParamsOf<AllReduceParams>(operation).peers) {
          peer.announcement = reinterpret_cast<uint64_t>(&nowhere);
        }
      }
    }
  };
  for (const Kind& kind : kKinds) {
    if (kind.num_splits > 1) continue;
    const std::string wrong = ExploreOrders({kind, kind}, {{0, 1}, {1, 0}}, change);
    CHECK(wrong.ends_with("waits for ever"));
  }
}

TEST(checking_the_partition_after_a_signal_is_found) {
  const Change change = [](RankProgram& program) {
    // The lane's first operation is the check, and its last is the end of the call.
    CHECK(IsKernel(program.lane.front(), kCheckPartitionKernel));
    std::rotate(program.lane.begin(), program.lane.begin() + 1, program.lane.end() - 1);
    for (ConcurrentWork& work : program.concurrent) --work.after;
  };
  for (const Kind& kind : kKinds) {
    const std::string wrong =
        Explore({kind}, 2, kUnsignedWrap, Search::kMisplaced, change, {false, true});
    if (wrong == "rank 0 has not failed, but a peer is misplaced") continue;
    check::Fail(__FILE__, __LINE__, Describe({kind}, 2), ": found '", wrong, "'");
  }
}

std::vector<Kind> InOnePiece(Reduction reduction) {
  std::vector<Kind> kinds = Kinds(reduction);
  std::erase_if(kinds, [](const Kind& kind) { return kind.num_splits > 1; });
  return kinds;
}

// Copies after a failed wait may overwrite data that a peer still reads; a sum by
// multicast stores nothing then, and the end of the call notifies the peers.
TEST(failing_without_notifying_the_peers_at_once_is_found) {
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (!IsKernel(operation, kWaitKernel)) continue;
      ParamsOf<WaitParams>(operation).waiting.poisons.num_peers = 0;
    }
  };
  ExpectFound("has not failed", change, InOnePiece(Reduction::kSchedule),
              Search::kFailures);
}

// The rank's sums are as wrong as the data that it read, but the peers use them as
// complete.
TEST(signalling_sums_by_multicast_after_a_failure_is_found) {
  static uint64_t no_failure = 0;
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (IsKernel(operation, kWaitKernel)) {
        ParamsOf<WaitParams>(operation).waiting.poisons.num_peers = 0;
      } else if (IsKernel(operation, kSignalKernel)) {
        ParamsOf<SignalParams>(operation).own.failed =
            reinterpret_cast<uint64_t>(&no_failure);
      } else if (IsKernel(operation, kMulticastSumKernel)) {
        operation.kernel = nullptr;  // it stores what it has
      }
    }
  };
  for (const Kind& kind : InOnePiece(Reduction::kMulticast)) {
    const std::string wrong =
        Explore({kind}, 2, kUnsignedWrap, Search::kFailures, change);
    CHECK(wrong.ends_with("has not failed, and read another piece than it means"));
  }
}

TEST(ending_a_call_without_looking_whether_a_peer_failed_is_found) {
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (!IsKernel(operation, kEndKernel)) continue;
      RankWords& own = ParamsOf<EndParams>(operation).own;
      own.poison = own.failed;
    }
  };
  for (const Reduction reduction : {Reduction::kSchedule, Reduction::kMulticast}) {
    ExpectFound("has not failed", change, InOnePiece(reduction), Search::kFailures);
  }
}

}  // namespace jax_ub

CHECK_MAIN()
