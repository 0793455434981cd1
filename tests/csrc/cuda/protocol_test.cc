// Proves the protocol of cuda_slots.h for all orders of the ranks' operations, with the
// schedules that run and the code that enqueues them; and shows that the proof would see
// what it is there to see.

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
  Pattern pattern;
  Method method;
  int num_splits;
  Variant variant = Variant::kPlain;
};

// One of each way in which slots are used: products change nothing about it, and bulk
// and external send as pipeline does with one piece.
constexpr Kind kKinds[] = {
    {Pattern::kAllGatherMatmul, Method::kRingExchange, 1},
    {Pattern::kAllGatherMatmul, Method::kRingExchange, 1, Variant::kAggregate},
    {Pattern::kAllGatherMatmul, Method::kPipeline, 1},
    {Pattern::kAllGatherMatmul, Method::kPipeline, 2},
    {Pattern::kMatmulReduceScatter, Method::kRingExchange, 1},
    {Pattern::kMatmulReduceScatter, Method::kPipeline, 2},
    {Pattern::kMatmulReduceScatter, Method::kPipeline, 1, Variant::kOverlapFirstGemm},
    {Pattern::kMatmulAllReduce, Method::kRingExchange, 1},
    {Pattern::kMatmulAllReduce, Method::kRingExchange, 1, Variant::kOneShot},
    {Pattern::kMatmulAllReduce, Method::kPipeline, 2},
};

// Around zero, and where the sign changes.
constexpr uint64_t kUnsignedWrap = UINT64_MAX;
constexpr uint64_t kSignedWrap = INT64_MAX;

Collective Make(const Kind& kind, int num_ranks) {
  return MakeCollective(kind.pattern, kind.method, num_ranks, kind.num_splits,
                        kind.variant);
}

std::string Describe(const std::vector<Kind>& kinds, int num_ranks) {
  std::string text = "P = " + std::to_string(num_ranks);
  for (const Kind& kind : kinds) {
    text += std::string(", ") + std::string(PatternName(kind.pattern)) + " by " +
            std::string(MethodName(kind.method)) + ", " +
            std::string(VariantName(kind.variant)) + ", in " +
            std::to_string(kind.num_splits);
  }
  return text;
}

using Change = std::function<void(RankProgram&)>;

// What is wrong with calls in a row when every rank's program is changed, or "".
std::string Explore(const std::vector<Kind>& kinds,
                    int num_ranks,
                    uint64_t first_epoch,
                    bool eager,
                    const Change& change = nullptr) {
  std::vector<Collective> calls;
  for (const Kind& kind : kinds) calls.push_back(Make(kind, num_ranks));
  ProtocolModel model(calls, first_epoch);
  if (change) {
    for (RankProgram& program : model.programs()) change(program);
  }
  return model.Explore(eager);
}

void Prove(const std::vector<Kind>& kinds, int num_ranks, uint64_t first_epoch) {
  const std::string wrong = Explore(kinds, num_ranks, first_epoch, /*eager=*/true);
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

// Waits for what is always so instead of for `freed`.
void ForgetFreed(RankProgram& program) {
  for (Operation& operation : program.lane) {
    if (!IsKernel(operation, kWaitKernel)) continue;
    WaitParams& params = ParamsOf<WaitParams>(operation);
    if (params.ahead == 0) params.flag = params.own.epoch;
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

bool Has(const Kind& kind, int num_ranks) {
  return HasVariant(kind.pattern, kind.method, num_ranks, kind.variant);
}

TEST(three_ranks_read_what_they_mean_in_two_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (!Has(first, 3) || !Has(second, 3)) continue;
      // Two pieces beside two pieces: only a collective beside itself. Others take long.
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

// Every single order, also of flags: the shorter search must come to the same end.
TEST(taking_flags_at_once_finds_what_the_whole_search_finds) {
  const Change changes[] = {nullptr, ForgetFreed};
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      for (const Change& change : changes) {
        const bool found =
            !Explore({first, second}, 2, kUnsignedWrap, true, change).empty();
        const bool is_there =
            !Explore({first, second}, 2, kUnsignedWrap, false, change).empty();
        CHECK_EQ(found, is_there);
      }
    }
  }
}

// Three calls of any of these kinds, changed so, are found to be wrong.
void ExpectFound(const std::string& text,
                 const Change& change,
                 const std::vector<Kind>& kinds = {std::begin(kKinds),
                                                   std::end(kKinds)}) {
  for (const Kind& kind : kinds) {
    const std::string wrong =
        Explore({kind, kind, kind}, 2, kUnsignedWrap, true, change);
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
        ParamsOf<SignalParams>(operation).num_targets = 0;
      }
    }
  });
}

// Frees the next call too, before it has begun. All but the two stages of an all-reduce
// in a ring of two, which wait for each other anyway.
TEST(counting_the_epoch_before_freeing_is_found) {
  std::vector<Kind> kinds(std::begin(kKinds), std::end(kKinds));
  std::erase_if(kinds, [](const Kind& kind) {
    return kind.pattern == Pattern::kMatmulAllReduce &&
           kind.method == Method::kRingExchange && kind.variant == Variant::kPlain;
  });
  const Change change = [](RankProgram& program) {
    for (size_t i = 0; i < program.lane.size(); ++i) {
      if (!IsKernel(program.lane[i], kEndKernel)) continue;
      Operation signal = program.lane[i];
      signal.kernel = FindEmulatedKernel(kSignalKernel);
      ParamsOf<SignalParams>(program.lane[i]).num_targets = 0;
      program.lane.insert(program.lane.begin() + ++i, signal);
      for (ReadBeside& read : program.beside) read.after += read.after >= i;
    }
  };
  ExpectFound("reads piece", change, kinds);
}

TEST(ending_a_call_before_its_slots_are_read_is_found) {
  ExpectFound("reads piece", [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (IsKernel(operation, kEndKernel)) operation.needs = 0;
    }
  });
}

TEST(signalling_before_writing_is_found) {
  ExpectFound("reads piece", [](RankProgram& program) {
    for (size_t i = 0; i + 1 < program.lane.size(); ++i) {
      if (program.lane[i].kernel == nullptr) {
        std::swap(program.lane[i], program.lane[i + 1]);
        ++i;
      }
    }
  });
}

TEST(waiting_for_the_call_before_is_found) {
  ExpectFound("reads piece", [](RankProgram& program) {
    for (Operation& operation : program.lane) {
      if (IsKernel(operation, kWaitKernel)) ParamsOf<WaitParams>(operation).ahead = 0;
    }
  });
}

}  // namespace jax_ub

CHECK_MAIN()
