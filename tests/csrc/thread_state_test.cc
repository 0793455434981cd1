// Tests the floating-point and signal state of the threads on which XLA continues a
// program, and that a call does not change the state of its caller's thread.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#include <cfenv>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine_calls.h"
#include "platform/arithmetic_mode.h"
#include "platform/thread.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;

// Returns whether subnormals are flushed to zero; the smallest normal number is
// 1.18e-38.
bool FlushesSubnormals() {
  volatile float x = 1.5e-38f;
  volatile float buffer = 0.5f;
  volatile float product = x * buffer;
  return product == 0;
}

struct ThreadState {
  bool flushes = FlushesSubnormals();
  int rounding = std::fegetround();
  size_t stack_bytes = 0;
  std::string name;
  sigset_t mask;
  cpu_set_t cores;

  ThreadState() {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, &stack_bytes);
    pthread_attr_destroy(&attributes);
    char text[16];
    pthread_getname_np(pthread_self(), text, sizeof(text));
    name = text;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    sched_getaffinity(0, sizeof(cores), &cores);
  }
};

void CheckIsXlas(const ThreadState& state) {
#if defined(__x86_64__) || defined(__aarch64__)
  CHECK(state.flushes);
#endif
  CHECK_EQ(state.rounding, FE_TONEAREST);
  CHECK(state.stack_bytes >= size_t{8} << 20);
  CHECK_EQ(state.name, "jax_ub");
  CHECK_EQ(sigismember(&state.mask, SIGUSR1), 0);
}

// Changes the state of this thread, which threads that it starts inherit.
void Disturb() {
  std::fesetround(FE_DOWNWARD);
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
}

TEST(AThreadDoesNotInheritTheStateOfItsCreator) {
  const SignalMask mask;
  std::thread creator([&] {
    Disturb();
    auto state = std::make_shared<std::promise<ThreadState>>();
    StartThread([state] { state->set_value(ThreadState()); }, mask);
    CheckIsXlas(state->get_future().get());
    Thread joined([] { CHECK_EQ(std::fegetround(), FE_TONEAREST); }, mask);
    joined.Join();
    CHECK_EQ(std::fegetround(), FE_DOWNWARD);
  });
  creator.join();
}

TEST(AShortStackLimitDoesNotShortenTheStack) {
  rlimit before;
  getrlimit(RLIMIT_STACK, &before);
  pthread_attr_t normal, tiny;
  pthread_getattr_default_np(&normal);
  pthread_attr_init(&tiny);
  pthread_attr_setstacksize(&tiny, size_t{1} << 20);
  pthread_setattr_default_np(&tiny);
  auto state = std::make_shared<std::promise<ThreadState>>();
  StartThread([state] { state->set_value(ThreadState()); });
  const ThreadState there = state->get_future().get();
  pthread_setattr_default_np(&normal);
  CHECK(there.stack_bytes >= size_t{8} << 20);
}

// Runs a call whose ranks are submitted from disturbed threads. Returns the states in
// which the completions ran, except those that ran inside Submit.
std::vector<ThreadState> StatesOfCompletions(Engine& engine,
                                             const CallAttributes& at,
                                             const jax_ub_test::Sizes& sizes,
                                             bool fails) {
  static int64_t run_id = 0;
  ++run_id;
  Arrays arrays(1);
  CallSite site(at);
  std::vector<RankCall> calls = MakeCalls(at, sizes, arrays);
  if (fails) calls[1].operands[0].dtype = DType::kF16;  // ranks disagree
  std::mutex mutex;                                     // guards states
  std::vector<ThreadState> states;
  std::vector<std::promise<void>> ends(calls.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    threads.emplace_back([&, rank] {
      Disturb();
      const std::thread::id submitting = std::this_thread::get_id();
      const auto done = [&, rank, submitting](const std::exception_ptr&) {
        if (std::this_thread::get_id() != submitting) {
          std::lock_guard lock(mutex);
          states.emplace_back();
        }
        ends[rank].set_value();
      };
      const int64_t device = 100 + static_cast<int64_t>(rank);
      try {
        engine.Submit(site, run_id, device, calls[rank], done);
      } catch (...) {
        done(std::current_exception());
      }
      CHECK(!FlushesSubnormals());
      CHECK_EQ(std::fegetround(), FE_DOWNWARD);
    });
  }
  for (std::promise<void>& end : ends) end.get_future().wait();
  for (std::thread& thread : threads) thread.join();
  return states;
}

TEST(CompletionsRunInTheStateOfXlasThreads) {
  Engine& engine = NewEngine();
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  for (Method method : {Method::kDirect, Method::kRingExchange}) {
    const CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, method, 4);
    for (bool fails : {false, true}) {
      // The first sizes run inline, the second ones on the pool.
      for (const jax_ub_test::Sizes& sizes :
           {jax_ub_test::Sizes{1, 2, 3, 2}, jax_ub_test::Sizes{1, 65, 384, 280}}) {
        const auto states = StatesOfCompletions(engine, at, sizes, fails);
        // Submit rejects a rank that arrives after the failure.
        CHECK(fails || states.size() >= 3);
        for (const ThreadState& state : states) {
          CheckIsXlas(state);
          CHECK(CPU_EQUAL(&state.cores, &allowed));
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
