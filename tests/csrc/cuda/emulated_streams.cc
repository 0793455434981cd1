// Emulates the driver functions for streams and events.
#include <algorithm>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

bool IsLegacy(const Stream& stream) { return stream.handle == 0; }
bool IsBlocking(const Stream& stream) {
  return !IsLegacy(stream) && (stream.flags & CU_STREAM_NON_BLOCKING) == 0;
}

// Returns the moment at which the newest work of the stream's hardware queue starts,
// and makes `starts` the newest.
SharedMoment FollowInQueue(Call& call, const Stream& stream, SharedMoment starts) {
  return std::exchange(call.machine.contexts[stream.device].starts[stream.queue],
                       std::move(starts));
}

void PostAwait(Call& call, Stream& stream, SharedMoment moment) {
  auto starts = std::make_shared<Moment>();
  SharedMoment before = FollowInQueue(call, stream, starts);
  stream.lane->Post({"a wait for an event",
                     [moment = std::move(moment), before = std::move(before), starts] {
                       AwaitUnseen(before);
                       moment->Await();
                       SetUnseen(*starts);
                     },
                     nullptr});
}

SharedMoment PostMoment(Stream& stream) {
  auto moment = std::make_shared<Moment>();
  stream.lane->Post({"an event", [moment] { moment->Set(); }, nullptr});
  return moment;
}

// Makes the legacy stream wait for all work of the blocking streams, and these for the
// legacy stream.
void BeginLegacy(Call& call, Stream& stream) {
  Context& context = call.machine.contexts[stream.device];
  if (IsLegacy(stream)) {
    for (const auto& [handle, other] : call.machine.streams) {
      if (other->device == stream.device && IsBlocking(*other)) {
        PostAwait(call, stream, PostMoment(*other));
      }
    }
  } else if (IsBlocking(stream) && context.legacy_tail != nullptr) {
    PostAwait(call, stream, context.legacy_tail);
  }
}
void EndLegacy(Call& call, Stream& stream) {
  if (IsLegacy(stream)) {
    call.machine.contexts[stream.device].legacy_tail = PostMoment(stream);
  }
}

// Returns whether an operation of the legacy stream is rejected because a blocking
// stream is being captured.
bool IsImplicitlyCaptured(Call& call, const Stream& stream) {
  if (!IsLegacy(stream)) return false;
  bool is_captured = false;
  for (const auto& [handle, other] : call.machine.streams) {
    if (other->device != stream.device || !IsBlocking(*other) ||
        other->capture == nullptr) {
      continue;
    }
    other->capture->is_valid = false;
    is_captured = true;
  }
  return is_captured;
}

CUresult Invalidate(const SharedCapture& capture, CUresult result) {
  capture->is_valid = false;
  return result;
}

CUresult StreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return RunInContext("StreamCreateWithPriority", [&](Call& call) {
    if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Stream made;
    made.device = call.device();
    made.flags = flags;
    made.priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
    made.queue = call.machine.num_streams++ % call.machine.options.num_queues;
    made.lane = call.machine.TakeLane();
    *stream =
        reinterpret_cast<CUstream>(call.machine.streams.Add(std::move(made))->handle);
    return CUDA_SUCCESS;
  });
}

// The work of a destroyed stream still completes.
CUresult StreamDestroy(CUstream handle) {
  return Run("StreamDestroy", [&](Call& call) {
    Stream* const stream = call.machine.streams.Find(handle);
    if (stream == nullptr) {
      call.Violate("cuStreamDestroy of a stream that is not there");
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != nullptr) {
      return Invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    call.machine.spare_lanes.push_back(stream->lane);
    call.machine.streams.Remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult StreamSynchronize(CUstream handle) {
  return Run("StreamSynchronize", [&](Call& call) {
    Stream* const stream = call.FindStream(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
      return Invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if (IsImplicitlyCaptured(call, *stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    BeginLegacy(call, *stream);
    call.AwaitAtEnd(PostMoment(*stream));
    return CUDA_SUCCESS;
  });
}

// Makes the stream join the capture of the stream that recorded the event.
CUresult WaitForCaptured(Stream& stream, const Event& event) {
  if (event.capture->is_over) return CUDA_ERROR_CAPTURED_EVENT;
  if (!event.capture->is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (IsLegacy(stream)) {
    return Invalidate(event.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  if (stream.capture != nullptr && stream.capture != event.capture) {
    stream.capture->is_valid = false;
    return Invalidate(event.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  stream.capture = event.capture;
  stream.tips.insert(event.tips.begin(), event.tips.end());
  return CUDA_SUCCESS;
}

CUresult StreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned flags) {
  return Run("StreamWaitEvent", [&](Call& call) {
    Stream* const stream = call.FindStream(stream_handle);
    const Event* const event = call.machine.events.Find(event_handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_NOT_SUPPORTED;
    if (event->capture != nullptr) return WaitForCaptured(*stream, *event);
    if (stream->capture != nullptr) {
      if (!stream->capture->is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      return Invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (event->recorded == nullptr) return CUDA_SUCCESS;
    if (IsImplicitlyCaptured(call, *stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    BeginLegacy(call, *stream);
    PostAwait(call, *stream, event->recorded);
    EndLegacy(call, *stream);
    return CUDA_SUCCESS;
  });
}

CUresult EventCreate(CUevent* event, unsigned flags) {
  return RunInContext("EventCreate", [&](Call& call) {
    constexpr unsigned kKnown =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (event == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    Event made;
    made.device = call.device();
    made.flags = flags;
    *event =
        reinterpret_cast<CUevent>(call.machine.events.Add(std::move(made))->handle);
    return CUDA_SUCCESS;
  });
}

CUresult EventDestroy(CUevent event) {
  return Run("EventDestroy", [&](Call& call) {
    if (call.machine.events.Remove(event)) return CUDA_SUCCESS;
    call.Violate("cuEventDestroy of an event that is not there");
    return CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult EventRecord(CUevent event_handle, CUstream stream_handle) {
  return Run("EventRecord", [&](Call& call) {
    Event* const event = call.machine.events.Find(event_handle);
    Stream* const stream = call.FindStream(stream_handle);
    if (event == nullptr || stream == nullptr || event->device != stream->device) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != nullptr) {
      if (!stream->capture->is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      event->recorded.reset();
      event->capture = stream->capture;
      event->tips = stream->tips;
      return CUDA_SUCCESS;
    }
    if (IsImplicitlyCaptured(call, *stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    BeginLegacy(call, *stream);
    event->capture.reset();
    event->tips.clear();
    event->recorded = PostMoment(*stream);
    EndLegacy(call, *stream);
    return CUDA_SUCCESS;
  });
}

// Checks that the host may query or wait for an event.
CUresult CheckHostMayAsk(Call& call, const Event* event) {
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture != nullptr) {
    return Invalidate(event->capture, CUDA_ERROR_CAPTURED_EVENT);
  }
  return call.RefuseInCapture();
}

CUresult EventQuery(CUevent handle) {
  return Run("EventQuery", [&](Call& call) {
    const Event* const event = call.machine.events.Find(handle);
    if (const CUresult refused = CheckHostMayAsk(call, event)) return refused;
    if (event->recorded == nullptr) return CUDA_SUCCESS;
    if (!event->recorded->is_set()) return CUDA_ERROR_NOT_READY;
    call.AwaitAtEnd(event->recorded);
    return CUDA_SUCCESS;
  });
}

CUresult EventSynchronize(CUevent handle) {
  return Run("EventSynchronize", [&](Call& call) {
    const Event* const event = call.machine.events.Find(handle);
    if (const CUresult refused = CheckHostMayAsk(call, event)) return refused;
    if (event->recorded != nullptr) call.AwaitAtEnd(event->recorded);
    return CUDA_SUCCESS;
  });
}

CUresult EventElapsedTime(float* milliseconds,
                          CUevent begin_handle,
                          CUevent end_handle) {
  return RunInContext("EventElapsedTime", [&](Call& call) {
    const Event* const begin = call.machine.events.Find(begin_handle);
    const Event* const end = call.machine.events.Find(end_handle);
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (begin == nullptr || end == nullptr || begin->recorded == nullptr ||
        end->recorded == nullptr ||
        ((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!begin->recorded->is_set() || !end->recorded->is_set()) {
      return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->recorded->time() -
                                                             begin->recorded->time())
                        .count();
    return CUDA_SUCCESS;
  });
}

CUresult CtxSynchronize() {
  return RunInContext("CtxSynchronize", [&](Call& call) {
    const int device = call.device();
    for (const auto& [handle, stream] : call.machine.streams) {
      if (stream->device == device && stream->capture != nullptr) {
        return Invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
      }
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    for (const auto& [handle, stream] : call.machine.streams) {
      if (stream->device == device) call.AwaitAtEnd(PostMoment(*stream));
    }
    if (auto& legacy = call.machine.contexts[device].legacy) {
      call.AwaitAtEnd(PostMoment(*legacy));
    }
    return CUDA_SUCCESS;
  });
}

CUresult CtxGetStreamPriorityRange(int* least, int* greatest) {
  return RunInContext("CtxGetStreamPriorityRange", [&](Call& call) {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return CUDA_SUCCESS;
  });
}

}  // namespace

SharedMoment MomentOf(Stream& stream) { return PostMoment(stream); }

// Makes the operation occupy multiprocessors of its device while it runs.
static void Occupy(Call& call, Operation& operation) {
  operation.run = [processors = call.machine.contexts[operation.device].processors,
                   wanted = operation.num_processors, run = std::move(operation.run)] {
    int num = 0;
    {
      const Unseen unseen;
      num = processors->Take(wanted);
    }
    run();
    const Unseen unseen;
    processors->Give(num);
  };
}

CUresult Enqueue(Call& call, CUstream handle, Operation operation) {
  Stream* const stream = call.FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  operation.device = stream->device;
  operation.priority = stream->priority;
  if (operation.num_processors > 0) Occupy(call, operation);
  if (stream->capture != nullptr) {
    return AddNodes(*stream, {{std::move(operation), {}}});
  }
  if (IsImplicitlyCaptured(call, *stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  std::vector<SharedRegion> uses;
  if (const CUresult result = BeginUse(call, operation, uses)) return result;
  BeginLegacy(call, *stream);
  Machine* const machine = &call.machine;
  auto starts = std::make_shared<Moment>();
  SharedMoment before = FollowInQueue(call, *stream, starts);
  stream->lane->Post(
      {operation.name,
       [before = std::move(before), starts, run = std::move(operation.run)] {
         AwaitUnseen(before);
         SetUnseen(*starts);
         run();
       },
       [machine, uses = std::move(uses)]() mutable {
         const std::lock_guard lock(machine->mutex);
         EndUse(*machine, uses);
       }});
  EndLegacy(call, *stream);
  return CUDA_SUCCESS;
}

void FillStreams(Driver& driver) {
  driver.StreamCreateWithPriority = StreamCreateWithPriority;
  driver.StreamDestroy = StreamDestroy;
  driver.StreamSynchronize = StreamSynchronize;
  driver.StreamWaitEvent = StreamWaitEvent;
  driver.EventCreate = EventCreate;
  driver.EventRecord = EventRecord;
  driver.EventQuery = EventQuery;
  driver.EventSynchronize = EventSynchronize;
  driver.EventElapsedTime = EventElapsedTime;
  driver.EventDestroy = EventDestroy;
  driver.CtxSynchronize = CtxSynchronize;
  driver.CtxGetStreamPriorityRange = CtxGetStreamPriorityRange;
}

}  // namespace jax_ub::emulated
