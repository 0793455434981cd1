// What this process did when: spans of time in fixed memory, one buffer a thread.
//
// Off, a call costs one relaxed load. On, a span costs two readings of the monotonic
// clock, which all processes of a host share, and a write to the thread's own buffer;
// no lock is taken but once a call, to name it. A full buffer drops what comes behind,
// and counts it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/call.h"

namespace jax_ub {

// The steps of a schedule, by their numbers there; and what is around them.
enum class TraceKind : uint8_t {
  kMultiply,
  kCopy,
  kReduce,
  kPut,
  kPublish,
  kWait,
  kRelease,
  kWaitFree,
  kCall,     // a rank's call, from its arrival to its completion
  kGather,   // a rank's wait for the others' calls
  kBarrier,  // a wait for other processes
  kUnit,     // a part of a GEMM, as threads share it
};
inline constexpr int kNumTraceKinds = 12;

std::string_view TraceKindName(TraceKind kind);

struct TraceEvent {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int32_t call = -1;     // which of the trace's calls
  int16_t rank = kNone;  // in the group; kNone: for all of them
  int16_t chunk = kAllChunks;
  int16_t split = 0;
  int16_t peer = kNone;
  int16_t slot = kNone;
  TraceKind kind = TraceKind::kCall;
  Payload payload = Payload::kOperand;
};

// One execution of a call site by its group.
struct TraceCall {
  std::string label;
  Op op = Op::kMatmul;
  Method method = Method::kDirect;
  Variant variant = Variant::kPlain;
  int num_ranks = 1;
  int num_splits = 0;            // as asked for
  std::vector<int64_t> devices;  // [rank]; empty for a local call
  std::string operands;          // of one rank, "bf16[2, 128, 512] ..."
};

struct TraceThread {
  int64_t num_dropped = 0;
  std::vector<TraceEvent> events;
};

struct Trace {
  std::vector<TraceCall> calls;
  std::vector<TraceThread> threads;  // only those that did anything
  int64_t num_dropped_calls = 0;
};

struct TraceContext;

class Tracer {
 public:
  static constexpr int kNumThreads = 256;
  static constexpr int64_t kMaxCalls = 1 << 20;

  Tracer();
  ~Tracer();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // Forgets what was recorded. Each thread that does anything gets room for
  // `events_per_thread`.
  void Start(int64_t events_per_thread);
  void Stop() { enabled_.store(false, std::memory_order_relaxed); }

  // What was recorded since Start.
  Trace Read() const;

  // Whose spans those of the call are: nobody's, where no more calls are recorded.
  TraceContext BeginCall(TraceCall call);
  // Nothing, if the call began before the last Start.
  void Record(int64_t generation, const TraceEvent& event);

 private:
  struct Buffer;

  Buffer* OwnBuffer();

  std::atomic<bool> enabled_{false};
  std::atomic<int64_t> generation_{0};
  std::atomic<int64_t> events_per_thread_{0};
  // By a hash of the thread's id; a thread that ended leaves its place to the next one
  // of that id.
  std::array<std::atomic<Buffer*>, kNumThreads> buffers_ = {};
  std::atomic<int64_t> num_unbuffered_{0};  // events of more threads than that

  mutable std::mutex mutex_;  // guards the two below
  std::vector<TraceCall> calls_;
  int64_t num_dropped_calls_ = 0;
};

// Whose spans: nobody's, where the tracer is off.
struct TraceContext {
  Tracer* tracer = nullptr;
  int64_t generation = 0;  // which of its traces
  int32_t call = -1;
  int16_t rank = kNone;

  TraceContext OfRank(int which) const {
    return {tracer, generation, call, static_cast<int16_t>(which)};
  }
  // A span from `begin_ns` to now; nothing for begin_ns = 0.
  void Since(int64_t begin_ns, TraceKind kind) const;
};

// Now, on the clock of all traces; 0 where the tracer is off.
int64_t TraceNow(const Tracer* tracer);

// A span from here to the end of the block.
class TraceScope {
 public:
  TraceScope(const TraceContext& context, TraceKind kind)
      : TraceScope(context, kind, Step{.peer = kNone, .slot = kNone}) {}
  TraceScope(const TraceContext& context, TraceKind kind, const Step& step);
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;
  ~TraceScope();

 private:
  Tracer* const tracer_;
  const int64_t generation_;
  TraceEvent event_;
};

}  // namespace jax_ub
