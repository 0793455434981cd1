// Records spans of time of this process in memory of fixed size, with one buffer per
// thread. A full buffer drops further events and counts them.
//
// If tracing is disabled, a call costs one relaxed load. If it is enabled, a span costs
// two reads of the monotonic clock, which all processes of a host share, and a write to
// the buffer of its thread. A lock is taken only once per call, to register the call.
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

// The kind of a recorded span. The kinds before kCall are the steps of a schedule, with
// the values of StepKind. The other kinds are other activities.
enum class TraceKind : uint8_t {
  kMultiply,
  kCopy,
  kReduce,
  kPut,
  kPublish,
  kWait,
  kRelease,
  kWaitFree,
  kCall,     // a rank's call, from arrival to completion
  kGather,   // a rank's wait for the calls of the other local ranks
  kBarrier,  // a wait at a barrier with other processes
  kUnit,     // a work unit of a GEMM
};
inline constexpr int kNumTraceKinds = 12;

std::string_view TraceKindName(TraceKind kind);

struct TraceEvent {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int32_t call = -1;  // index into Trace::calls
  int32_t split = 0;
  int16_t rank = kNone;  // in the group; kNone: all ranks
  int16_t chunk = kAllChunks;
  int16_t peer = kNone;
  TraceKind kind = TraceKind::kCall;
  Payload payload = Payload::kOperand;
};

// One execution of a call by a group of ranks, as a trace describes it.
struct TraceCall {
  std::string label;
  Op op = Op::kMatmul;
  Method method = Method::kDirect;
  Variant variant = Variant::kPlain;
  int num_ranks = 1;
  int num_splits = 0;            // as requested; 0: the engine chooses
  std::vector<int64_t> devices;  // [rank]; empty for a local call
  std::string operands;  // shapes of one rank's operands: "bf16[2, 128, 512] ..."
};

struct TraceThread {
  int64_t num_dropped = 0;
  std::vector<TraceEvent> events;
};

struct Trace {
  std::vector<TraceCall> calls;
  std::vector<TraceThread> threads;  // only threads with events
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

  // Discards all events and starts recording. Each thread that records an event gets
  // memory for `events_per_thread` events.
  void Start(int64_t events_per_thread);
  void Stop() { enabled_.store(false, std::memory_order_relaxed); }

  // Returns all calls and the events of all threads since the last Start.
  Trace Read() const;

  // Registers a call, and returns the context that records its spans. Returns an empty
  // context, which records nothing, if kMaxCalls calls are already registered.
  TraceContext BeginCall(TraceCall call);
  // Counts a call that could not be registered, because memory was exhausted. Trace
  // reports the number of such calls.
  void DropCall();
  // Records an event. `generation` is TraceContext::generation of the event's call.
  // Does nothing if Start was called after the call began.
  void Record(int64_t generation, const TraceEvent& event);

 private:
  struct Buffer;

  Buffer* OwnBuffer();

  std::atomic<bool> enabled_{false};
  std::atomic<int64_t> generation_{0};
  std::atomic<int64_t> events_per_thread_{0};
  // Open-addressing hash table, keyed by thread id. A buffer remains in the table when
  // its thread exits. A later thread with the same id reuses the buffer.
  std::array<std::atomic<Buffer*>, kNumThreads> buffers_ = {};
  // Number of events that were dropped because the hash table was full.
  std::atomic<int64_t> num_unbuffered_{0};

  mutable std::mutex mutex_;  // guards `calls_` and `num_dropped_calls_`
  std::vector<TraceCall> calls_;
  int64_t num_dropped_calls_ = 0;
};

// The call and the rank whose spans are recorded. Nothing is recorded if `tracer` is
// null.
struct TraceContext {
  Tracer* tracer = nullptr;
  int64_t generation = 0;  // value of Tracer::generation_ when the call began
  int32_t call = -1;
  int16_t rank = kNone;

  TraceContext OfRank(int which) const {
    return {tracer, generation, call, static_cast<int16_t>(which)};
  }
  // Records a span that began at `begin_ns` and ends when this function is called. Does
  // nothing if `begin_ns` is 0, which TraceNow returns while tracing is disabled.
  void Since(int64_t begin_ns, TraceKind kind) const;
};

// Returns the time of the trace clock (monotonic) in ns, or 0 if tracing is disabled.
int64_t TraceNow(const Tracer* tracer);

// Records the lifetime of this object, from its constructor to its destructor, as a
// span.
class TraceScope {
 public:
  TraceScope(const TraceContext& context, TraceKind kind, const Step& step = {});
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;
  ~TraceScope();

 private:
  Tracer* const tracer_;
  const int64_t generation_;
  TraceEvent event_;
};

}  // namespace jax_ub
