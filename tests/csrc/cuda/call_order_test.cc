// Tests calls that ranks enqueue in different orders: every rank fails at once, its
// results are NaN, and its error names both call sites.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "cuda/gpu_member.h"
#include "platform/error.h"
#include "processes.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {
namespace {

void ExpectBothNamed(const std::string& text) {
  for (const char* part :
       {"CommunicatorError", "make different calls", "(call site jit_f/0)",
        "(call site jit_f/1)", "in the same order"}) {
    if (text.find(part) != std::string::npos) continue;
    check::Fail(__FILE__, __LINE__, "'", part, "' is not in: ", text);
  }
}

// Two call sites of all ranks, which differ only in their names or in all attributes.
class TwoCalls {
 public:
  TwoCalls(Gpus& gpus,
           Op op,
           Op other_op,
           int num_ranks,
           const Placement& placement = {},
           bool is_captured = false)
      : gpus_(gpus) {
    for (const Op one : {op, other_op}) {
      CallAttributes at = MakeAttributes(one, Method::kPipeline, num_ranks);
      at.channel = "jit_f/" + std::to_string(calls_.size());
      calls_.push_back(
          std::make_unique<GpuCalls>(gpus, at, jax_ub_test::Sizes{}, DType::kF32,
                                     static_cast<int>(calls_.size()), placement));
    }
    for (const auto& one : calls_) {
      if (is_captured) {
        captured_.push_back(std::make_unique<CapturedCalls>(gpus, *one));
      }
      for (const int rank : one->local_ranks()) one->Initialize(rank);
    }
  }

  // Enqueues the call of the n-th call site.
  void Enqueue(int rank, int n) {
    if (captured_.empty()) return calls_[n]->Execute(rank);
    captured_[n]->Launch(rank);
  }
  // Enqueues the calls of each rank in its order, in one thread per rank. The engine
  // rejects the calls of a rank that is so late that the others have already failed.
  void Enqueue(const std::vector<std::vector<int>>& orders) {
    std::vector<std::thread> threads;
    for (const int rank : local_ranks()) {
      threads.emplace_back([this, rank, &orders] {
        try {
          for (const int n : orders[rank]) Enqueue(rank, n);
        } catch (const CommunicatorError& error) {
          ExpectBothNamed(error.what());
          is_refused_[rank] = true;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    gpus_.Synchronize();
  }

  // Returns whether the engine has rejected a call; its results are then unchanged.
  bool is_refused(int rank) const { return is_refused_[rank]; }
  const std::vector<int>& local_ranks() const { return calls_[0]->local_ranks(); }
  GpuCalls& operator[](int n) { return *calls_[n]; }

 private:
  Gpus& gpus_;
  std::vector<std::unique_ptr<GpuCalls>> calls_;
  std::vector<std::unique_ptr<CapturedCalls>> captured_;
  std::array<std::atomic<bool>, kMaxRanks> is_refused_ = {};
};

struct OrderCase {
  Op op, other_op;
  std::vector<std::vector<int>> orders;  // [rank]
};

std::vector<OrderCase> Cases() {
  std::vector<OrderCase> cases;
  for (const auto& [op, other_op] :
       {std::pair(Op::kAllGatherMatmul, Op::kAllGatherMatmul),
        std::pair(Op::kAllGatherMatmul, Op::kMatmulReduceScatter),
        std::pair(Op::kMatmulAllReduce, Op::kAllGather)}) {
    cases.push_back({op, other_op, {{0, 1}, {1, 0}}});
    cases.push_back({op, other_op, {{0, 0, 1}, {0, 1}}});  // skips one
    cases.push_back({op, other_op, {{0, 1}, {0, 0, 1}}});  // repeats one
    cases.push_back({op, other_op, {{0, 1, 0}, {1, 0, 0}, {0, 1, 0}}});
  }
  return cases;
}

TEST(RanksOfOneProcessFailAndNameBothCalls) {
  for (const OrderCase& one : Cases()) {
    for (const bool is_captured : {false, true}) {
      const int num_ranks = static_cast<int>(one.orders.size());
      Gpus gpus({.num_devices = num_ranks, .seed = 5, .max_delay_us = 50});
      TwoCalls calls(gpus, one.op, one.other_op, num_ranks, {}, is_captured);
      calls.Enqueue({static_cast<size_t>(num_ranks), {0, 1}});
      for (const int n : {0, 1}) CheckRight(calls[n]);
      const auto began = std::chrono::steady_clock::now();
      calls.Enqueue(one.orders);
      CHECK(SecondsSince(began) < kAtOnceS);
      const auto failures = gpus.engine().Failures();
      CHECK_EQ(failures.size(), 1u);
      for (const auto& [name, failure] : failures) {
        ExpectBothNamed(check::TextOf(failure));
      }
      // All results of each rank's last call are NaN.
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (!calls.is_refused(rank)) {
          CHECK_EQ(calls[one.orders[rank].back()].NumNumbers(rank), 0);
        }
        CHECK_THROWS(calls[0].Initialize(rank), "make different calls");
      }
    }
  }
}

TEST(ProcessesFailAndNameBothCalls) {
  for (const OrderCase& one : Cases()) {
    AddressExchange addresses;
    std::vector<int> process_of_rank;
    for (const auto& order : one.orders) {
      process_of_rank.push_back(static_cast<int>(process_of_rank.size()));
      static_cast<void>(order);
    }
    Processes processes = RunOnGpus(
        addresses, {process_of_rank}, {.seed = 5, .max_delay_us = 50},
        [&](GpuMember& member) {
          Gpus& gpus = member.gpus();
          const int num_ranks = static_cast<int>(one.orders.size());
          TwoCalls calls(gpus, one.op, one.other_op, num_ranks, member.placement());
          calls.Enqueue({static_cast<size_t>(num_ranks), {0, 1}});
          for (const int n : {0, 1}) CheckRight(calls[n]);
          calls.Enqueue(one.orders);
          const int rank = calls.local_ranks()[0];
          if (!calls.is_refused(rank)) {
            CHECK_EQ(calls[one.orders[rank].back()].NumNumbers(rank), 0);
          }
          const auto failures = gpus.engine().Failures();
          CHECK_EQ(failures.size(), 1u);
          for (const auto& [name, failure] : failures) {
            ExpectBothNamed(check::TextOf(failure));
          }
        });
    CheckAllWell(processes);
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
