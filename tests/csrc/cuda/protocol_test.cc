// Proves the protocol of cuda_slots.h for all orders of the ranks' operations.
// protocol_errors_test.cc shows that the proof detects what it should.

#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/protocol_search.h"

namespace jax_ub {

void Prove(const std::vector<Kind>& kinds,
           int num_ranks,
           uint64_t first_epoch,
           Search search = Search::kEager) {
  const std::string wrong = Explore(kinds, num_ranks, first_epoch, search);
  if (wrong.empty()) return;
  check::Fail(__FILE__, __LINE__, Describe(kinds, num_ranks), ": ", wrong);
}

TEST(two_ranks_read_the_right_data_in_any_two_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      Prove({first, second}, 2, kUnsignedWrap);
      Prove({first, second}, 2, kSignedWrap);
    }
  }
}

TEST(two_ranks_read_the_right_data_in_any_three_calls) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      for (const Kind& third : kKinds) Prove({first, second, third}, 2, kUnsignedWrap);
    }
  }
}

bool Has(const Kind& kind, int num_ranks) {
  return HasVariant(kind.collective, kind.method, num_ranks, kind.variant);
}

TEST(three_ranks_read_the_right_data_in_two_calls) {
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

TEST(four_ranks_read_the_right_data_in_two_calls) {
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

// Ranks may fail at every wait, also several ranks at once.
TEST(no_rank_succeeds_with_wrong_data_if_ranks_fail) {
  for (const Kind& first : kKinds) {
    for (const Kind& second : kKinds) {
      if (first.num_splits + second.num_splits > 2) continue;
      Prove({first, second}, 2, kUnsignedWrap, Search::kFailures);
    }
  }
}

TEST(no_rank_forwards_wrong_data_if_ranks_fail) {
  for (const Kind& kind : kKinds) {
    if (kind.num_splits == 1 && Has(kind, 3)) {
      Prove({kind}, 3, kUnsignedWrap, Search::kFailures);
    }
  }
}

// Covers each set of ranks: on a mesh of several axes some may be in their places.
TEST(all_ranks_fail_at_once_if_some_run_another_partition) {
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

}  // namespace jax_ub

CHECK_MAIN()
