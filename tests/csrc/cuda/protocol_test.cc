// Proves the protocol of cuda_slots.h for all orders of the ranks' operations, with the
// real schedules and the code that enqueues them. Planted errors show that the proof
// detects what it should.

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/protocol_model.h"
#include "cuda/recorded_program.h"
#include "schedule/schedule.h"

namespace jax_ub {

struct Kind {
  CollectiveKind collective;
  Method method;
  int num_splits;
  Variant variant = Variant::kPlain;
  bool by_multicast = false;
};

// One collective for each use of slots, without regard to GEMMs; bulk and external send
// as pipeline does with one piece.
constexpr Kind kKinds[] = {
    {CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 1},
    {CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 1, Variant::kAggregate},
    {CollectiveKind::kAllGatherMatmul, Method::kPipeline, 1},
    {CollectiveKind::kAllGatherMatmul, Method::kPipeline, 2},
    {CollectiveKind::kMatmulReduceScatter, Method::kRingExchange, 1},
    {CollectiveKind::kMatmulReduceScatter, Method::kPipeline, 2},
    {CollectiveKind::kMatmulReduceScatter, Method::kPipeline, 1,
     Variant::kOverlapFirstGemm},
    {CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 1},
    {CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 1, Variant::kOneShot},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 2},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 1, Variant::kPlain, true},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 2, Variant::kPlain, true},
    {CollectiveKind::kAllReduce, Method::kPipeline, 1, Variant::kPlain, true},
};

std::vector<Kind> Kinds(bool by_multicast) {
  std::vector<Kind> kinds(std::begin(kKinds), std::end(kKinds));
  std::erase_if(kinds, [&](const Kind& k) { return k.by_multicast != by_multicast; });
  return kinds;
}

// First epochs: where the unsigned value wraps, and where the sign changes.
constexpr uint64_t kUnsignedWrap = UINT64_MAX;
constexpr uint64_t kSignedWrap = INT64_MAX;

ModelCall Make(const Kind& kind, int num_ranks) {
  return {MakeRankSchedules(kind.collective, kind.method, num_ranks, kind.num_splits,
                            kind.variant),
          kind.by_multicast};
}

std::string Describe(const std::vector<Kind>& kinds, int num_ranks) {
  std::string text = "P = " + std::to_string(num_ranks);
  for (const Kind& kind : kinds) {
    text += std::string(", ") + std::string(CollectiveKindName(kind.collective)) +
            " by " + std::string(MethodName(kind.method)) + ", " +
            std::string(VariantName(kind.variant)) + ", in " +
            std::to_string(kind.num_splits) + (kind.by_multicast ? ", multicast" : "");
  }
  return text;
}

using Change = std::function<void(RankProgram&)>;

// Returns the error that the search finds in consecutive calls, "" if there is none.
// `change` modifies the program of every rank; the given ranks are misplaced in the
// last call.
std::string Explore(const std::vector<Kind>& kinds,
                    int num_ranks,
                    uint64_t first_epoch,
                    Search search,
                    const Change& change = nullptr,
                    const std::vector<bool>& is_misplaced = {}) {
  std::vector<ModelCall> calls;
  for (const Kind& kind : kinds) calls.push_back(Make(kind, num_ranks));
  calls.back().is_misplaced = is_misplaced;
  ProtocolModel model(calls, first_epoch);
  if (change) {
    for (RankProgram& program : model.programs()) change(program);
  }
  return model.Explore(search);
}

void Prove(const std::vector<Kind>& kinds,
           int num_ranks,
           uint64_t first_epoch,
           Search search = Search::kEager) {
  const std::string wrong = Explore(kinds, num_ranks, first_epoch, search);
  if (wrong.empty()) return;
  check::Fail(__FILE__, __LINE__, Describe(kinds, num_ranks), ": ", wrong);
}

bool IsKernel(const Operation& operation, std::string_view name) {
  return operation.kernel != nullptr && operation.kernel->name == name;
}

template <typename Params>
Params& ParamsOf(Operation& operation) {
  return *reinterpret_cast<Params*>(operation.params.data());
}

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

// Moves each signal before the operations on slots that precede it.
void SignalBeforeWriting(RankProgram& program) {
  for (size_t i = 1; i < program.lane.size(); ++i) {
    if (!IsKernel(program.lane[i], kSignalKernel)) continue;
    for (size_t at = i; at > 0 && program.lane[at - 1].uses_slots(); --at) {
      std::swap(program.lane[at - 1], program.lane[at]);
    }
  }
}

TEST(two_ranks_read_what_they_mean_in_any_two_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      Prove({first, second}, 2, kUnsignedWrap);
      Prove({first, second}, 2, kSignedWrap);
    }
  }
}

TEST(two_ranks_read_what_they_mean_in_any_three_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      for (const Kind& third : kKinds) Prove({first, second, third}, 2, kUnsignedWrap);
    }
  }
}

// Returns the error that the search finds if the ranks' orders are these.
std::string ExploreOrders(const std::vector<Kind>& kinds,
                          const std::vector<std::vector<int>>& orders,
                          const Change& change = nullptr) {
  std::vector<ModelCall> calls;
  const int num_ranks = static_cast<int>(orders.size());
  for (const Kind& kind : kinds) calls.push_back(Make(kind, num_ranks));
  ProtocolModel model(calls, kUnsignedWrap, orders);
  if (change) {
    for (RankProgram& program : model.programs()) change(program);
  }
  return model.Explore(Search::kOtherOrder);
}

bool Has(const Kind& kind, int num_ranks) {
  return HasVariant(kind.collective, kind.method, num_ranks, kind.variant);
}

TEST(three_ranks_read_what_they_mean_in_two_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (!Has(first, 3) || !Has(second, 3)) continue;
      // Two slices twice take long: only for a collective with itself.
      if (first.num_splits + second.num_splits < 4 || &first == &second) {
        Prove({first, second}, 3, kUnsignedWrap);
      }
    }
  }
}

TEST(four_ranks_read_what_they_mean_in_two_calls) {
  for (const Kind& kind : kKinds) {
    if (kind.num_splits == 1) Prove({kind, kind}, 4, kUnsignedWrap);
  }
}

// Compares with the search over every order, also of flags, which must give the same
// result.
TEST(taking_flags_at_once_finds_what_the_whole_search_finds) {
  const Change changes[] = {nullptr, SignalBeforeWriting};
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      for (const Change& change : changes) {
        const bool found =
            !Explore({first, second}, 2, kUnsignedWrap, Search::kEager, change).empty();
        const bool is_there =
            !Explore({first, second}, 2, kUnsignedWrap, Search::kWhole, change).empty();
        CHECK_EQ(found, is_there);
      }
    }
  }
}

// Checks that the search finds an error in three calls of each kind after the change.
void ExpectFound(const std::string& text,
                 const Change& change,
                 const std::vector<Kind>& kinds = Kinds(false),
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
  std::vector<Kind> kinds = Kinds(false);
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
      for (Beside& read : program.beside) read.after += read.after >= i;
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
  ExpectFound("reads piece", change, Kinds(true));
}

TEST(a_reduction_by_multicast_without_its_last_barrier_is_found) {
  const Change change = [](RankProgram& program) { ForgetBarrier(program, false); };
  ExpectFound("reads piece", change, Kinds(true));
}

TEST(signalling_before_the_product_is_there_is_found) {
  std::vector<Kind> kinds = Kinds(true);
  std::erase_if(
      kinds, [](const Kind& k) { return k.collective == CollectiveKind::kAllReduce; });
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) operation.needs = 0;
  };
  ExpectFound("reads piece", change, kinds);
}

TEST(what_else_is_found_of_schedules_is_found_of_reductions_by_multicast) {
  ExpectFound("reads piece", SignalBeforeWriting, Kinds(true));
  ExpectFound("reads piece", WaitForTheCallBefore, Kinds(true));
}

// In the ring before it, the previous rank sets all flags; here each peer has its own.
TEST(a_reduction_by_multicast_that_does_not_wait_for_freed_is_found) {
  const std::vector<Kind> calls = {kKinds[0], Kinds(true)[0]};
  CHECK_EQ(Explore(calls, 3, kUnsignedWrap, Search::kEager), "");
  CHECK(!Explore(calls, 3, kUnsignedWrap, Search::kEager, ForgetFreed).empty());
}

// Ranks may fail at every wait, also several ranks at once.
TEST(nobody_ends_a_call_well_with_the_wrong_data_when_ranks_fail) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      Prove({first, second}, 2, kUnsignedWrap, Search::kFailures);
    }
  }
}

TEST(nobody_passes_on_the_wrong_data_when_ranks_fail) {
  for (const Kind& kind : kKinds) {
    if (kind.num_splits == 1 && Has(kind, 3)) {
      Prove({kind}, 3, kUnsignedWrap, Search::kFailures);
    }
  }
}

// Covers each set of ranks: on a mesh of several axes some may be in their places.
TEST(all_ranks_hear_at_once_that_some_are_misplaced) {
  const auto prove = [](const std::vector<Kind>& kinds, int num_ranks) {
    for (int set = 1; set < 1 << num_ranks; ++set) {
      std::vector<bool> is_misplaced;
      for (int rank = 0; rank < num_ranks; ++rank) {
        is_misplaced.push_back((set >> rank & 1) != 0);
      }
      const std::string wrong = Explore(kinds, num_ranks, kUnsignedWrap,
                                        Search::kMisplaced, nullptr, is_misplaced);
      if (wrong.empty()) continue;
      check::Fail(__FILE__, __LINE__, Describe(kinds, num_ranks), ": ", wrong);
    }
  };
  for (const Kind& second : kKinds) {
    for (const Kind& first : kKinds) {
      if (first.num_splits + second.num_splits <= 2) prove({first, second}, 2);
    }
    if (second.num_splits == 1 && Has(second, 3)) prove({second}, 3);
  }
}

void ProveOrders(const std::vector<Kind>& kinds,
                 const std::vector<std::vector<int>>& orders) {
  const std::string wrong = ExploreOrders(kinds, orders);
  if (wrong.empty()) return;
  check::Fail(__FILE__, __LINE__, Describe(kinds, static_cast<int>(orders.size())),
              ": ", wrong);
}

// Covers two call sites, also of one kind, as first calls and after a common call.
TEST(all_ranks_fail_at_once_when_two_make_calls_in_different_orders) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      ProveOrders({first, second}, {{0, 1}, {1, 0}});
      ProveOrders({first, second}, {{0, 0, 1}, {0, 1}});  // skips one, or repeats it
    }
  }
}

TEST(all_ranks_fail_at_once_when_three_make_calls_in_different_orders) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      if (!Has(first, 3) || !Has(second, 3)) continue;
      // No rank ends the first call, so there is no second call.
      for (int other = 0; other < 3; ++other) {
        std::vector<std::vector<int>> orders(3, {0});
        orders[other] = {1};
        ProveOrders({first, second}, orders);
      }
    }
  }
}

void ForgetTags(RankProgram& program) {
  for (Operation& operation : program.lane) {
    if (IsKernel(operation, kWaitKernel)) {
      ParamsOf<WaitParams>(operation).waiting.tag = 1;
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
      if (!IsKernel(operation, kWaitKernel)) continue;
      ParamsOf<WaitParams>(operation).announcements.num_peers = 0;
    }
  };
  for (const Kind& kind : kKinds) {
    if (kind.num_splits > 1) continue;
    const std::string wrong = ExploreOrders({kind, kind}, {{0, 1}, {1, 0}}, change);
    CHECK(wrong.ends_with("waits for ever"));
  }
}

TEST(checking_the_place_behind_a_signal_is_found) {
  const Change change = [](RankProgram& program) {
    // The lane's first operation is the check, and its last is the end of the call.
    CHECK(IsKernel(program.lane.front(), kCheckPartitionKernel));
    std::rotate(program.lane.begin(), program.lane.begin() + 1, program.lane.end() - 1);
    for (Beside& beside : program.beside) --beside.after;
  };
  for (const Kind& kind : kKinds) {
    const std::string wrong =
        Explore({kind}, 2, kUnsignedWrap, Search::kMisplaced, change, {false, true});
    if (wrong == "rank 0 has not failed, but a peer is misplaced") continue;
    check::Fail(__FILE__, __LINE__, Describe({kind}, 2), ": found '", wrong, "'");
  }
}

std::vector<Kind> InOnePiece(bool by_multicast) {
  std::vector<Kind> kinds = Kinds(by_multicast);
  std::erase_if(kinds, [](const Kind& kind) { return kind.num_splits > 1; });
  return kinds;
}

// Copies after a failed wait may overwrite data that a peer still reads; a sum by
// multicast stores nothing then, and the end of the call notifies the peers.
TEST(failing_without_telling_the_peers_at_once_is_found) {
  const Change change = [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (!IsKernel(operation, kWaitKernel)) continue;
      ParamsOf<WaitParams>(operation).waiting.poisons.num_peers = 0;
    }
  };
  ExpectFound("has not failed", change, InOnePiece(false), Search::kFailures);
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
  for (const Kind& kind : InOnePiece(true)) {
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
  for (const bool by_multicast : {false, true}) {
    ExpectFound("has not failed", change, InOnePiece(by_multicast), Search::kFailures);
  }
}

}  // namespace jax_ub

CHECK_MAIN()
