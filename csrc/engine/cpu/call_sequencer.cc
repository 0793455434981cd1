#include "engine/cpu/call_sequencer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/cpu/multi_process_direct.h"
#include "engine/cpu/slot_run.h"
#include "engine/executor.h"
#include "platform/deadline.h"
#include "platform/error.h"
#include "transport/cpu/slots.h"

namespace jax_ub {

namespace {

// initialize_ub allocates buffers of 8 bytes per element of its `shape` [T, H], plus a
// constant. CapacityError inverts this formula to say which shape is large enough.
constexpr int64_t kBufferBytesPerElement = 8;
constexpr int64_t kBufferSlackBytes = 64 << 10;

// Upper bound on the difference between XLA's run ids of two launches in flight. A run
// id is a hash of the program plus its number of launches. A larger difference means
// that two processes have different hashes of the program, because they compiled it
// separately.
constexpr uint32_t kMaxOffset = 1 << 16;

uint32_t RunOf(const CallLogEntry& entry) {
  return static_cast<uint32_t>(entry.execution >> 32);
}

bool IsNear(uint32_t one, uint32_t other) {
  return one - other < kMaxOffset || other - one < kMaxOffset;
}

int64_t BufferBytesOf(const CollectiveCall& collective,
                      const SharedMemoryCommunicator& communicator,
                      ThreadPool& pool) {
  const CallAttributes& at = *collective.attributes;
  if (!UsesSlots(at)) {
    return DirectBufferBytes(at, collective.calls[0], communicator.num_processes());
  }
  const SlotRequirements plan = SlotRequirementsOf(collective, pool);
  if (plan.num_slots > SharedMemoryCommunicator::kMaxSlots) {
    throw UnsupportedError(
        "jax_ub." + at.label + ": " + std::string(OpName(at.op)) + " with num_splits " +
        std::to_string(plan.num_splits) + " needs " + std::to_string(plan.num_slots) +
        " slots, and communicator '" + communicator.name() + "' has flags for " +
        std::to_string(SharedMemoryCommunicator::kMaxSlots) +
        ": give the name fewer num_splits");
  }
  return plan.num_slots * SlotTransport::StrideOf(plan.slot_bytes);
}

// Returns an error if the call needs larger buffers than the communicator has, else
// nullptr. All processes return the same error, and each of them rejects the call. An
// error that only one process may have, such as std::bad_alloc, is thrown instead.
std::exception_ptr CapacityError(const CollectiveCall& collective,
                                 const SharedMemoryCommunicator& communicator,
                                 ThreadPool& pool) {
  int64_t size_bytes = 0;
  try {
    size_bytes = BufferBytesOf(collective, communicator, pool);
  } catch (const UnsupportedError&) {
    return std::current_exception();
  }
  if (size_bytes <= communicator.buffer_bytes()) return nullptr;
  const int64_t elements =
      (size_bytes - kBufferSlackBytes + kBufferBytesPerElement - 1) /
      kBufferBytesPerElement;
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << collective.attributes->label
       << ": the call needs " << size_bytes << " bytes per rank, and communicator '"
       << communicator.name() << "' has " << communicator.buffer_bytes()
       << ". Give initialize_ub a shape [T, H] with T * H of at least " << elements;
  return std::make_exception_ptr(CommunicatorError(text.str()));
}

std::string Join(const std::deque<std::shared_ptr<CollectiveCall>>& collectives) {
  std::string text;
  for (const auto& collective : collectives) {
    text += (text.empty() ? "" : ", ") + collective->attributes->label + " (" +
            collective->attributes->channel + ")";
  }
  return text;
}

}  // namespace

CallLogEntry RunIdOffsets::LogEntryOf(const CollectiveCall& collective) {
  return {collective.call_site_key,
          static_cast<uint64_t>(static_cast<uint32_t>(collective.run_id)) << 32 |
              static_cast<uint32_t>(collective.count),
          collective.is_first};
}

std::shared_ptr<CollectiveCall> RunIdOffsets::Find(
    const CallLogEntry& entry,
    const std::deque<std::shared_ptr<CollectiveCall>>& complete) {
  std::shared_ptr<CollectiveCall> candidate;
  for (const std::shared_ptr<CollectiveCall>& collective : complete) {
    const CallLogEntry local = LogEntryOf(*collective);
    if (local.call_site != entry.call_site) continue;
    if (static_cast<uint32_t>(local.execution) !=
        static_cast<uint32_t>(entry.execution)) {
      continue;
    }
    const auto known = offsets_.find(collective->call_site_id);
    if (known != offsets_.end()) {
      if (RunOf(local) - RunOf(entry) == known->second) return collective;
    } else if (IsNear(RunOf(local), RunOf(entry))) {
      if (RunOf(local) != RunOf(entry)) continue;
      offsets_[collective->call_site_id] = 0;
      return collective;
    } else if (candidate) {
      throw CommunicatorError(
          "CommunicatorError: jax_ub." + collective->attributes->label +
          ": two programs with the channel '" + collective->attributes->channel +
          "' run concurrently, and this process and the leader compiled them "
          "differently "
          "(one of them loaded a program from the persistent compilation cache), so "
          "their calls cannot be matched. Dispatch them from one thread");
    } else {
      candidate = collective;
    }
  }
  if (candidate) {
    offsets_[candidate->call_site_id] = RunOf(LogEntryOf(*candidate)) - RunOf(entry);
  }
  return candidate;
}

CallSequencer::CallSequencer(std::shared_ptr<SharedMemoryCommunicator> communicator,
                             std::vector<int64_t> devices,
                             int generation,
                             ThreadPool& pool,
                             Hooks hooks)
    : communicator_(std::move(communicator)),
      devices_(std::move(devices)),
      generation_(generation),
      pool_(pool),
      hooks_(std::move(hooks)) {}

std::shared_ptr<CallSequencer> CallSequencer::Make(
    std::shared_ptr<SharedMemoryCommunicator> communicator,
    std::vector<int64_t> devices,
    int generation,
    ThreadPool& pool,
    Hooks hooks) {
  std::shared_ptr<CallSequencer> sequencer(new CallSequencer(
      std::move(communicator), std::move(devices), generation, pool, std::move(hooks)));
  // A task that releases a reference to the sequencer, which may be the last one. The
  // task is allocated here, because the failure handler that submits it must not fail.
  struct LetGo : BlockingTask {
    std::shared_ptr<CallSequencer> alive;
    void Execute() override { alive.reset(); }
  };
  sequencer->communicator_->OnPoison(
      [weak = std::weak_ptr(sequencer), &pool,
       let_go = std::make_shared<LetGo>()](const std::exception_ptr& reason) {
        std::shared_ptr<CallSequencer> alive = weak.lock();
        if (!alive) return;
        alive->OnPoison(reason);
        // `alive` may be the last reference, whose release destroys the communicator.
        // The current thread belongs to the communicator and cannot destroy it, so a
        // thread of the pool releases `alive`. In Close, the caller holds another
        // reference.
        if (alive->closing_thread_.load() == std::this_thread::get_id()) return;
        let_go->alive = std::move(alive);
        pool.SubmitBlocking(let_go);
      });
  return sequencer;
}

void CallSequencer::Enqueue(std::shared_ptr<CollectiveCall> collective) noexcept {
  std::shared_ptr<BlockingTask> run_calls;
  std::exception_ptr failure;
  try {
    run_calls =
        std::make_shared<Closure>([self = shared_from_this()] { self->RunCalls(); });
    std::lock_guard lock(mutex_);
    failure = communicator_->poison();
    if (!failure) {
      // Both insertions are made under the lock, so that calls have the same order in
      // the call log and in the queue.
      if (communicator_->is_leader()) {
        communicator_->AppendToCallLog(RunIdOffsets::LogEntryOf(*collective));
      }
      complete_.push_back(collective);
      if (std::exchange(is_running_, true)) run_calls = nullptr;
    }
  } catch (...) {
    // Memory is exhausted, so the call cannot be queued. The communicator fails,
    // because the peers would wait for this call.
    failure = std::current_exception();
    Fail(failure);
  }
  if (failure) return Complete(collective, failure, false);
  changed_.notify_all();
  if (run_calls) pool_.SubmitBlocking(std::move(run_calls));
}

// Runs queued calls until the queue is empty. Runs as a BlockingTask of the thread
// pool, because it may block while it waits for peers or for local ranks.
void CallSequencer::RunCalls() noexcept {
  for (;;) {
    std::shared_ptr<CollectiveCall> collective;
    std::exception_ptr failure;
    int64_t call = 0;
    try {
      collective = NextCall();
      if (!collective) return;
      {
        std::lock_guard lock(mutex_);
        call = next_call_++;
      }
      failure = Run(collective, call);
    } catch (...) {
      failure = std::current_exception();
      Fail(failure);
    }
    if (!collective) {  // failed before a call was selected; Fail fails all of them
      if (Finish()) return;
      continue;
    }
    const bool is_last = Finish();
    Complete(collective, failure, is_last);
    if (is_last) return;
  }
}

// Returns true if the queue is empty. RunCalls must then return, and the next Enqueue
// submits RunCalls again.
bool CallSequencer::Finish() {
  std::lock_guard lock(mutex_);
  if (!complete_.empty()) return false;
  is_running_ = false;
  return true;
}

std::shared_ptr<CollectiveCall> CallSequencer::NextCall() {
  std::string label;
  bool is_first_call = false;
  {
    std::lock_guard lock(mutex_);
    // No call may begin after a failed call. A process may have skipped the barrier of
    // the failed call, so a peer may still read the buffers that the next call would
    // write. OnPoison fails the queued calls.
    if (complete_.empty() || communicator_->poison()) {
      is_running_ = false;
      return nullptr;
    }
    if (communicator_->is_leader()) {
      std::shared_ptr<CollectiveCall> collective = std::move(complete_.front());
      complete_.pop_front();
      return collective;
    }
    label = complete_.front()->attributes->label;
    for (const auto& collective : complete_) is_first_call |= collective->is_first;
  }
  // `next_call_` is read without a lock, because only the thread that executes RunCalls
  // changes it. This is the current thread.
  return WaitForLocalCall(
      communicator_->WaitForLogEntry(next_call_, ReasonFor(label, is_first_call)));
}

WaitReason CallSequencer::ReasonFor(const std::string& label,
                                    bool is_first_call) const {
  const Timeouts timeouts = hooks_.timeouts();
  return {label, 0, timeouts.Of(is_first_call), timeouts.SettingOf(is_first_call)};
}

std::shared_ptr<CollectiveCall> CallSequencer::WaitForLocalCall(
    const CallLogEntry& entry) {
  const WaitReason reason = ReasonFor(communicator_->name(), entry.is_first);
  StoppableDeadline deadline = StoppableDeadline::After(reason.timeout_s);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const std::exception_ptr failure = communicator_->poison()) {
      std::rethrow_exception(failure);
    }
    if (std::shared_ptr<CollectiveCall> collective =
            run_id_offsets_.Find(entry, complete_)) {
      complete_.erase(std::find(complete_.begin(), complete_.end(), collective));
      collective->is_first |= entry.is_first;
      return collective;
    }
    if (deadline.Expired()) throw DeadlineError(UnmatchedCallMessage(entry, reason));
    const std::cv_status woken = changed_.wait_until(lock, deadline.next_check());
    if (woken == std::cv_status::timeout && !complete_.empty()) {
      communicator_->PublishSubmitted(next_call_, Join(complete_));
    }
  }
}

// Returns the error message for a call in the leader's log that this process has not
// submitted in time. Requires `mutex_`.
std::string CallSequencer::UnmatchedCallMessage(const CallLogEntry& entry,
                                                const WaitReason& reason) const {
  std::ostringstream text;
  text << "CommunicatorError: jax_ub."
       << (complete_.empty() ? communicator_->name()
                             : complete_.front()->attributes->label)
       << ": " << communicator_->DescribeProcess(communicator_->process()) << " waited "
       << reason.timeout_s << " s for the local ranks of call " << next_call_
       << ", which the leader has started (call site " << std::hex << entry.call_site
       << ", run " << std::dec << static_cast<int32_t>(RunOf(entry)) << ", execution "
       << static_cast<uint32_t>(entry.execution) << ")";
  if (communicator_->has_arrived(0, next_call_)) {
    text << ": " << communicator_->call_signature(0, next_call_).text;
  }
  text << ". Submitted here: " << Join(complete_)
       << ". Run the same program with the same control flow in every process. "
       << reason.setting << " sets the seconds.";
  return text.str();
}

// Runs call number `call`. Returns an error if all processes reject the call. Throws
// any other error, which fails the communicator permanently.
std::exception_ptr CallSequencer::Run(
    const std::shared_ptr<const CollectiveCall>& call_to_run, int64_t call) {
  const CollectiveCall& collective = *call_to_run;
  const CallAttributes& at = *collective.attributes;
  const double timeout_s = hooks_.timeouts().call_s;
  CheckEqualShapes(collective);
  if (const std::exception_ptr capacity_error =
          CapacityError(collective, *communicator_, pool_)) {
    CompareSignatures(collective, call);
    return capacity_error;
  }
  if (UsesSlots(at)) {
    CompareSignatures(collective, call);
    RunThroughSlots(call_to_run, call, timeout_s);
  } else {
    ExecuteMultiProcess({at, collective.calls, call, timeout_s, collective.trace},
                        *communicator_, pool_,
                        [&] { CompareSignatures(collective, call); });
  }
  return nullptr;
}

// Waits in the arrival barrier until all processes have begun this call. Throws
// CommunicatorError if their signatures differ.
void CallSequencer::CompareSignatures(const CollectiveCall& collective, int64_t call) {
  const uint64_t signature = Signature(*collective.attributes, collective.calls[0]);
  communicator_->PublishSignature(call, signature, TextOf(signature, collective));
  {
    const TraceScope scope(collective.trace, TraceKind::kBarrier);
    communicator_->Barrier(
        call, 0, ReasonFor(collective.attributes->label, collective.is_first));
  }
  // All processes compare each signature with the leader's, so that they report the
  // same error.
  const CallSignature first = communicator_->call_signature(0, call);
  for (int p = 1; p < communicator_->num_processes(); ++p) {
    const CallSignature other = communicator_->call_signature(p, call);
    if (other.signature == first.signature) continue;
    const std::string begin =
        "CommunicatorError: jax_ub." + collective.attributes->label + ": ";
    const std::string names[] = {communicator_->DescribeProcess(0),
                                 communicator_->DescribeProcess(p)};
    const std::string units[] = {std::string(ScaledUnitIn(first.text)),
                                 std::string(ScaledUnitIn(other.text))};
    if (units[0] != units[1] && !units[0].empty() && !units[1].empty()) {
      throw CommunicatorError(begin + names[1] + " scales per " + units[1] + ", " +
                              names[0] + " per " + units[0] +
                              ". Pass the same recipe on all ranks");
    }
    throw CommunicatorError(begin + names[0] + " and " + names[1] + " do not agree: " +
                            first.text + "; and " + other.text + ", respectively");
  }
}

std::string CallSequencer::TextOf(uint64_t signature,
                                  const CollectiveCall& collective) {
  std::string& text = texts_[signature];
  if (text.empty()) text = DescribeCall(*collective.attributes, collective.calls[0]);
  return text;
}

void CallSequencer::RunThroughSlots(
    const std::shared_ptr<const CollectiveCall>& collective,
    int64_t call,
    double timeout_s) {
  const SlotRequirements requirements = SlotRequirementsOf(*collective, pool_);
  const auto run = std::make_shared<SlotRun>(
      collective, requirements, timeout_s, pool_,
      SlotRun::Hooks{.transport = [&](size_t i) -> Transport& {
                       return communicator_->rank(local_ranks()[i], call,
                                                  requirements.num_slots,
                                                  requirements.slot_bytes);
                     },
                     .poison = [&] { return communicator_->poison(); },
                     .fail = [&](const std::exception_ptr& reason) { Fail(reason); },
                     .done = nullptr});
  run->RunAndWait();
}

// Completes the ranks with `failure` or nullptr. Each rank gets its own thread, because
// XLA continues the program of a rank on the thread that completes it. With
// `inline_last`, the current thread completes the last rank.
void CallSequencer::Complete(const std::shared_ptr<CollectiveCall>& collective,
                             std::exception_ptr failure,
                             bool inline_last) noexcept {
  if (failure) failure = WithLabel(collective->attributes->label, failure);
  const std::vector<Completion>& completions = collective->completions;
  const size_t last = completions.size() - 1;
  Queue<BlockingTask> runs;
  for (size_t i = 0; i < completions.size(); ++i) {
    collective->trace.OfRank(collective->RankOf(i))
        .Since(collective->calls[i].submitted_ns, TraceKind::kCall);
    if (inline_last && i == last) continue;
    runs.Push(completions[i].AsTask(failure));
  }
  if (!runs.empty()) pool_.SubmitBlocking(std::move(runs));
  if (inline_last) completions[last](failure);
}

void CallSequencer::Fail(const std::exception_ptr& reason) noexcept {
  communicator_->Poison(reason);
}

void CallSequencer::OnPoison(const std::exception_ptr& reason) noexcept {
  // Acquires and releases the lock before the notification. Otherwise, a thread in
  // WaitForLocalCall could be between its check for a failure and its sleep, and miss
  // the notification.
  std::unique_lock(mutex_).unlock();
  changed_.notify_all();
  for (;;) {
    std::shared_ptr<CollectiveCall> collective;
    {
      std::lock_guard lock(mutex_);
      if (complete_.empty()) break;
      collective = std::move(complete_.front());
      complete_.pop_front();
    }
    Complete(collective, reason, false);
  }
  hooks_.on_failure(*this, reason);
}

std::exception_ptr CallSequencer::WithLabel(
    const std::string& label, const std::exception_ptr& reason) const noexcept try {
  const std::string begin = "CommunicatorError: jax_ub." + communicator_->name() + ": ";
  const auto relabeled = [&](const char* text) {
    return "CommunicatorError: jax_ub." + label + ": " + (text + begin.size());
  };
  try {
    std::rethrow_exception(reason);
  } catch (const DeadlineError& error) {
    if (!std::string_view(error.what()).starts_with(begin)) return reason;
    return std::make_exception_ptr(DeadlineError(relabeled(error.what())));
  } catch (const CommunicatorError& error) {
    if (!std::string_view(error.what()).starts_with(begin)) return reason;
    return std::make_exception_ptr(CommunicatorError(relabeled(error.what())));
  }
} catch (...) {
  return reason;  // another type of error, or no memory for the text
}

void CallSequencer::Close() {
  closing_thread_.store(std::this_thread::get_id());
  communicator_->Close();
}

int64_t CallSequencer::num_calls() const {
  std::lock_guard lock(mutex_);
  return next_call_;
}

double CallSequencer::BarrierSeconds(int count) {
  if (count < 1) {
    throw std::invalid_argument("barrier_seconds: count is " + std::to_string(count) +
                                ", expected at least 1");
  }
  // The barriers continue the phases of the latest call. Barrier generations must
  // increase, or else processes would pass barriers without waiting.
  const int64_t latest_call = num_calls() - 1;
  const std::string label = "barrier";
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    communicator_->Barrier(latest_call, next_phase_++, {label, 0, 60});
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / count;
}

}  // namespace jax_ub
