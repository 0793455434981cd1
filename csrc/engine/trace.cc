#include "engine/trace.h"

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "platform/mapping.h"

namespace jax_ub {

namespace {

constexpr std::array<std::string_view, kNumTraceKinds> kNames = {
    "multiply", "copy",      "reduce", "put",    "publish", "wait",
    "release",  "wait_free", "call",   "gather", "barrier", "unit"};

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string_view TraceKindName(TraceKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

// The events of one thread. Only that thread writes events. Another thread may read the
// first `size` events if `generation` equals Tracer::generation_, because events are
// overwritten only after the next Start.
struct Tracer::Buffer {
  static constexpr int64_t kEventBytes = sizeof(TraceEvent);

  explicit Buffer(std::thread::id id) : owner(id) {}

  // Reserves memory for `num_events` events, or for none if memory is exhausted. Must
  // not throw, because it runs in the destructors that record spans. The kernel commits
  // the memory page by page as events arrive. Committing all memory here, or using huge
  // pages, would delay the traced program.
  void Reserve(int64_t num_events) noexcept {
    if (num_events == room) return;
    room = 0;
    memory.reset();
    if (num_events > std::numeric_limits<int64_t>::max() / kEventBytes) return;
    memory = MapPrivate(static_cast<size_t>(num_events * kEventBytes), Pages::kSmall);
    if (memory) room = num_events;
  }

  TraceEvent* events() const {
    return reinterpret_cast<TraceEvent*>(memory.get().data);
  }

  const std::thread::id owner;
  std::atomic<int64_t> generation{0};
  std::atomic<int64_t> size{0};
  std::atomic<int64_t> num_dropped{0};
  // The owning thread sets the members below before its first event after each Start.
  // Readers skip the buffer until then, because its `generation` is an older one.
  int64_t room = 0;
  HostMapping memory;  // memory for `room` events
};

Tracer::Tracer() = default;

Tracer::~Tracer() {
  for (auto& buffer : buffers_) delete buffer.load();
}

void Tracer::Start(int64_t events_per_thread) {
  std::lock_guard lock(mutex_);
  calls_.clear();
  num_dropped_calls_ = 0;
  num_unbuffered_ = 0;
  events_per_thread_ = events_per_thread;
  ++generation_;
  enabled_.store(true, std::memory_order_release);
}

TraceContext Tracer::BeginCall(TraceCall call) {
  std::lock_guard lock(mutex_);
  if (static_cast<int64_t>(calls_.size()) == kMaxCalls) {
    ++num_dropped_calls_;
    return {};
  }
  calls_.push_back(std::move(call));
  return {this, generation_, static_cast<int32_t>(calls_.size()) - 1, kNone};
}

void Tracer::DropCall() {
  std::lock_guard lock(mutex_);
  ++num_dropped_calls_;
}

Tracer::Buffer* Tracer::OwnBuffer() {
  const std::thread::id self = std::this_thread::get_id();
  const size_t first = std::hash<std::thread::id>()(self);
  for (size_t i = 0; i < kNumThreads; ++i) {
    std::atomic<Buffer*>& entry = buffers_[(first + i) % kNumThreads];
    Buffer* buffer = entry.load(std::memory_order_acquire);
    if (buffer == nullptr) {
      std::unique_ptr<Buffer> mine(new (std::nothrow) Buffer(self));
      if (!mine) return nullptr;  // drop the event: destructors must not throw
      if (entry.compare_exchange_strong(buffer, mine.get())) return mine.release();
    }
    if (buffer->owner == self) return buffer;
  }
  return nullptr;
}

void Tracer::Record(int64_t generation, const TraceEvent& event) {
  if (generation_.load(std::memory_order_acquire) != generation) return;
  Buffer* const buffer = OwnBuffer();
  if (buffer == nullptr) {
    ++num_unbuffered_;
    return;
  }
  if (buffer->generation.load(std::memory_order_relaxed) != generation) {
    buffer->size.store(0, std::memory_order_relaxed);
    buffer->num_dropped.store(0, std::memory_order_relaxed);
    buffer->Reserve(events_per_thread_.load());
    buffer->generation.store(generation, std::memory_order_release);
  }
  const int64_t size = buffer->size.load(std::memory_order_relaxed);
  if (size == buffer->room) {
    buffer->num_dropped.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  std::construct_at(buffer->events() + size, event);
  buffer->size.store(size + 1, std::memory_order_release);
}

Trace Tracer::Read() const {
  std::lock_guard lock(mutex_);
  Trace trace;
  trace.calls = calls_;
  trace.num_dropped_calls = num_dropped_calls_;
  for (const auto& entry : buffers_) {
    const Buffer* const buffer = entry.load(std::memory_order_acquire);
    if (buffer == nullptr) continue;
    if (buffer->generation.load(std::memory_order_acquire) != generation_) continue;
    const int64_t size = buffer->size.load(std::memory_order_acquire);
    TraceThread thread;
    thread.num_dropped = buffer->num_dropped.load(std::memory_order_relaxed);
    thread.events.assign(buffer->events(), buffer->events() + size);
    trace.threads.push_back(std::move(thread));
  }
  if (num_unbuffered_ > 0) trace.threads.push_back({num_unbuffered_, {}});
  return trace;
}

int64_t TraceNow(const Tracer* tracer) {
  return tracer != nullptr && tracer->enabled() ? Now() : 0;
}

void TraceContext::Since(int64_t begin_ns, TraceKind kind) const {
  if (tracer == nullptr || begin_ns == 0) return;
  TraceEvent event;
  event.begin_ns = begin_ns;
  event.end_ns = Now();
  event.call = call;
  event.rank = rank;
  event.kind = kind;
  tracer->Record(generation, event);
}

TraceScope::TraceScope(const TraceContext& context, TraceKind kind, const Step& step)
    : tracer_(context.tracer), generation_(context.generation) {
  if (tracer_ == nullptr) return;
  event_.begin_ns = Now();
  event_.call = context.call;
  event_.rank = context.rank;
  event_.chunk = static_cast<int16_t>(step.chunk);
  event_.split = step.split;
  event_.peer = static_cast<int16_t>(step.peer);
  event_.kind = kind;
  event_.payload = step.payload;
}

TraceScope::~TraceScope() {
  if (tracer_ == nullptr) return;
  event_.end_ns = Now();
  tracer_->Record(generation_, event_);
}

}  // namespace jax_ub
