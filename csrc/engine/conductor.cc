#include "engine/conductor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/across.h"
#include "engine/crew_device.h"
#include "engine/direct.h"
#include "engine/exchange.h"
#include "engine/executor.h"
#include "platform/deadline.h"
#include "platform/error.h"
#include "transport/cpu/slots.h"

namespace jax_ub {

namespace {

// What initialize_ub allocates for a shape [T, H]: the text below turns it round.
constexpr int64_t kHalfBytesPerElement = 8;
constexpr int64_t kHalfSlackBytes = 64 << 10;

// Programs of one origin have run ids as far apart as launches are in flight; of two,
// any distance.
constexpr uint32_t kNear = 1 << 16;

uint32_t RunOf(const Order& order) {
  return static_cast<uint32_t>(order.execution >> 32);
}

bool IsNear(uint32_t one, uint32_t other) {
  return one - other < kNear || other - one < kNear;
}

int64_t HalfBytesOf(const Gang& gang,
                    const SharedCommunicator& communicator,
                    Crew& crew) {
  const Attributes& at = *gang.attributes;
  if (!UsesSlots(at)) {
    return HalfBytesOfDirect(at, gang.calls[0], communicator.num_processes());
  }
  const SlotPlan plan = gang.slot_plans->Find(at, gang.calls[0], CrewDevice(crew));
  if (plan.num_slots > SharedCommunicator::kMaxSlots) {
    throw UnsupportedError(
        "jax_ub." + at.label + ": " + std::string(OpName(at.op)) + " with num_splits " +
        std::to_string(plan.num_splits) + " needs " + std::to_string(plan.num_slots) +
        " slots, and communicator '" + communicator.name() + "' has flags for " +
        std::to_string(SharedCommunicator::kMaxSlots) +
        ": give the name fewer num_splits");
  }
  return plan.num_slots * SlotEnd::StrideOf(plan.slot_bytes);
}

// Why no process can run the call, all alike; or nothing.
std::exception_ptr Refusal(const Gang& gang,
                           const SharedCommunicator& communicator,
                           Crew& crew) {
  int64_t size_bytes = 0;
  try {
    size_bytes = HalfBytesOf(gang, communicator, crew);
  } catch (...) {
    return std::current_exception();
  }
  if (size_bytes <= communicator.half_bytes()) return nullptr;
  const int64_t elements =
      (size_bytes - kHalfSlackBytes + kHalfBytesPerElement - 1) / kHalfBytesPerElement;
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << gang.attributes->label << ": the call needs "
       << size_bytes << " bytes per rank, and communicator '" << communicator.name()
       << "' has " << communicator.half_bytes()
       << ". Give initialize_ub a shape [T, H] with T * H of at least " << elements;
  return std::make_exception_ptr(CommunicatorError(text.str()));
}

std::string Join(const std::deque<std::shared_ptr<Gang>>& gangs) {
  std::string text;
  for (const auto& gang : gangs) {
    text += (text.empty() ? "" : ", ") + gang->attributes->label + " (" +
            gang->attributes->channel + ")";
  }
  return text;
}

}  // namespace

Order Alignment::OrderOf(const Gang& gang) {
  return {gang.call_site_key,
          static_cast<uint64_t>(static_cast<uint32_t>(gang.run_id)) << 32 |
              static_cast<uint32_t>(gang.count),
          gang.is_first};
}

std::shared_ptr<Gang> Alignment::Find(
    const Order& order, const std::deque<std::shared_ptr<Gang>>& complete) {
  std::shared_ptr<Gang> candidate;
  for (const std::shared_ptr<Gang>& gang : complete) {
    const Order own = OrderOf(*gang);
    if (own.call_site != order.call_site) continue;
    if (static_cast<uint32_t>(own.execution) !=
        static_cast<uint32_t>(order.execution)) {
      continue;
    }
    const auto known = distances_.find(gang->call_site_id);
    if (known != distances_.end()) {
      if (RunOf(own) - RunOf(order) == known->second) return gang;
    } else if (IsNear(RunOf(own), RunOf(order))) {
      if (RunOf(own) != RunOf(order)) continue;
      distances_[gang->call_site_id] = 0;
      return gang;
    } else if (candidate) {
      throw CommunicatorError(
          "CommunicatorError: jax_ub." + gang->attributes->label +
          ": two programs with the channel '" + gang->attributes->channel +
          "' run at a time, and which of them the leader runs cannot be told, since "
          "this process and the leader compiled them differently (one of them from the "
          "persistent compilation cache). Dispatch them from one thread");
    } else {
      candidate = gang;
    }
  }
  if (candidate) {
    distances_[candidate->call_site_id] = RunOf(OrderOf(*candidate)) - RunOf(order);
  }
  return candidate;
}

Conductor::Conductor(std::shared_ptr<SharedCommunicator> communicator,
                     std::vector<int64_t> devices,
                     int generation,
                     Crew& crew,
                     Hooks hooks)
    : communicator_(std::move(communicator)),
      devices_(std::move(devices)),
      generation_(generation),
      crew_(crew),
      hooks_(std::move(hooks)) {}

std::shared_ptr<Conductor> Conductor::Make(
    std::shared_ptr<SharedCommunicator> communicator,
    std::vector<int64_t> devices,
    int generation,
    Crew& crew,
    Hooks hooks) {
  std::shared_ptr<Conductor> conductor(new Conductor(
      std::move(communicator), std::move(devices), generation, crew, std::move(hooks)));
  // Lets go of a conductor, from a thread of the crew; made here, where it may fail.
  struct LetGo : jax_ub::Run {
    std::shared_ptr<Conductor> alive;
    void Execute() override { alive.reset(); }
  };
  conductor->communicator_->OnPoison(
      [weak = std::weak_ptr(conductor), &crew,
       let_go = std::make_shared<LetGo>()](const std::exception_ptr& reason) {
        std::shared_ptr<Conductor> alive = weak.lock();
        if (!alive) return;
        alive->OnPoison(reason);
        // The communicator's own thread cannot end it; whoever closes it has it anyway.
        if (alive->closing_thread_.load() == std::this_thread::get_id()) return;
        let_go->alive = std::move(alive);
        crew.Start(let_go);
      });
  return conductor;
}

void Conductor::Take(std::shared_ptr<Gang> gang) {
  auto conduct =
      std::make_shared<Closure>([self = shared_from_this()] { self->Conduct(); });
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    failure = failure_;
    if (!failure) {
      // In one step, so that the log has the order of the queue.
      if (communicator_->is_leader()) {
        communicator_->PostOrder(Alignment::OrderOf(*gang));
      }
      complete_.push_back(gang);
      changed_.notify_all();
      if (is_conducting_) return;
      is_conducting_ = true;
    }
  }
  if (failure) return Complete(gang, failure, false);
  crew_.Start(std::move(conduct));
}

// A run: it may wait, for peers and for the own ranks.
void Conductor::Conduct() noexcept {
  for (;;) {
    std::shared_ptr<Gang> gang;
    std::exception_ptr failure;
    int64_t call = 0;
    try {
      gang = NextGang();
      if (!gang) return;
      {
        std::lock_guard lock(mutex_);
        call = next_call_++;
      }
      failure = Run(*gang, call);
    } catch (...) {
      failure = std::current_exception();
      Fail(failure);
    }
    if (!gang) {  // failed before it was known which one: all were told
      if (Finish()) return;
      continue;
    }
    const bool is_last = Finish();
    Complete(gang, failure, is_last);
    if (is_last) return;
  }
}

// True when nothing is left to conduct: the next call to come starts anew.
bool Conductor::Finish() {
  std::lock_guard lock(mutex_);
  if (!complete_.empty()) return false;
  is_conducting_ = false;
  return true;
}

std::shared_ptr<Gang> Conductor::NextGang() {
  std::string label;
  bool is_first_call = false;
  {
    std::lock_guard lock(mutex_);
    // OnPoison fails what is left, and may still be on its way. A call must not begin
    // behind one that failed: nobody met in that one's barrier, so that a peer may still
    // read the halves that this call would write.
    if (complete_.empty() || communicator_->poison()) {
      is_conducting_ = false;
      return nullptr;
    }
    if (communicator_->is_leader()) {
      std::shared_ptr<Gang> gang = std::move(complete_.front());
      complete_.pop_front();
      return gang;
    }
    label = complete_.front()->attributes->label;
    for (const auto& gang : complete_) is_first_call |= gang->is_first;
  }
  // No other thread changes next_call_.
  return AwaitGang(
      communicator_->WaitOrder(next_call_, ReasonFor(label, is_first_call)));
}

WaitReason Conductor::ReasonFor(const std::string& label, bool is_first_call) const {
  const Timeouts timeouts = hooks_.timeouts();
  return {label, 0, timeouts.Of(is_first_call), timeouts.SettingOf(is_first_call)};
}

std::shared_ptr<Gang> Conductor::AwaitGang(const Order& order) {
  const WaitReason reason = ReasonFor(communicator_->name(), order.is_first);
  const Deadline deadline = Deadline::After(reason.timeout_s);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (failure_) std::rethrow_exception(failure_);
    if (std::shared_ptr<Gang> gang = alignment_.Find(order, complete_)) {
      complete_.erase(std::find(complete_.begin(), complete_.end(), gang));
      gang->is_first |= order.is_first;
      return gang;
    }
    if (deadline.Expired()) throw DeadlineError(Unknown(order, reason));
    changed_.wait_until(lock, deadline.time());
  }
}

// The mutex is held.
std::string Conductor::Unknown(const Order& order, const WaitReason& reason) const {
  std::ostringstream text;
  text << "CommunicatorError: jax_ub."
       << (complete_.empty() ? communicator_->name()
                             : complete_.front()->attributes->label)
       << ": " << communicator_->DescribeProcess(communicator_->process()) << " waited "
       << reason.timeout_s << " s for its part in call " << next_call_
       << ", which the leader runs (call site " << std::hex << order.call_site
       << ", run " << std::dec << static_cast<int32_t>(RunOf(order)) << ", execution "
       << static_cast<uint32_t>(order.execution) << "), but here only "
       << Join(complete_)
       << " came. The processes run different programs, or this one took another "
          "branch. "
       << reason.setting << " sets the seconds.";
  return text.str();
}

// Returns why no process runs the call; throws what fails all of them for good.
std::exception_ptr Conductor::Run(const Gang& gang, int64_t call) {
  const Attributes& at = *gang.attributes;
  const double timeout_s = hooks_.timeouts().call_s;
  CheckAgreement(gang);
  if (const std::exception_ptr refusal = Refusal(gang, *communicator_, crew_)) {
    Meet(gang, call);
    return refusal;
  }
  if (UsesSlots(at)) {
    Meet(gang, call);
    RunSlots(gang, call, timeout_s);
  } else {
    ExecuteAcross({at, gang.calls, call, timeout_s, gang.trace}, *communicator_, crew_,
                  [&] { Meet(gang, call); });
  }
  return nullptr;
}

// The arrival: every process is in this call, and means the same by it.
void Conductor::Meet(const Gang& gang, int64_t call) {
  const uint64_t signature = Signature(*gang.attributes, gang.calls[0]);
  communicator_->Announce(call, signature, TextOf(signature, gang));
  {
    const TraceScope scope(gang.trace, TraceKind::kBarrier);
    communicator_->Barrier(call, 0, ReasonFor(gang.attributes->label, gang.is_first));
  }
  // All compare with the leader's, so that all say the same.
  const Announcement first = communicator_->announcement(0, call);
  for (int p = 1; p < communicator_->num_processes(); ++p) {
    const Announcement other = communicator_->announcement(p, call);
    if (other.signature == first.signature) continue;
    throw CommunicatorError("CommunicatorError: jax_ub." + gang.attributes->label +
                            ": " + communicator_->DescribeProcess(0) + " and " +
                            communicator_->DescribeProcess(p) + " do not agree: " +
                            first.text + "; and " + other.text + ", respectively");
  }
}

std::string Conductor::TextOf(uint64_t signature, const Gang& gang) {
  std::string& text = texts_[signature];
  if (text.empty()) text = DescribeCall(*gang.attributes, gang.calls[0]);
  return text;
}

void Conductor::RunSlots(const Gang& gang, int64_t call, double timeout_s) {
  const Attributes& at = *gang.attributes;
  const SlotPlan plan = gang.slot_plans->Find(at, gang.calls[0], CrewDevice(crew_));
  std::optional<WorkBeside> products;
  if (IsBulk(at.op)) {
    Work work = PlanProducts(at, gang.calls, crew_.workers());
    work.set_trace(gang.trace, {});
    products.emplace(std::move(work), crew_);
  }
  struct Running {
    std::atomic<size_t> next{0};  // of the local ranks
    std::mutex mutex;             // guards the two below
    std::condition_variable changed;
    size_t num_left = 0;
    std::exception_ptr failure;
  };
  const size_t num_ranks = gang.calls.size();
  const auto running = std::make_shared<Running>();
  running->num_left = num_ranks;
  const auto run_next = [&, num_ranks, running] {
    const size_t i = running->next.fetch_add(1);
    if (i >= num_ranks) return;  // too late: nothing else of the call may be left
    std::exception_ptr own;
    try {
      Transport& transport =
          communicator_->rank(local_ranks()[i], call, plan.num_slots, plan.slot_bytes);
      const TraceContext trace = gang.trace.OfRank(gang.RankOf(i));
      CrewDevice device(crew_, trace);
      ExecuteRank(at, gang.calls[i], plan, timeout_s, transport, device, trace);
    } catch (...) {
      own = std::current_exception();
      if (own != communicator_->poison()) {  // else it is what a peer has told
        const size_t num_begun = std::min(running->next.load(), num_ranks);
        own =
            WithShortage(own, static_cast<int>(num_begun), static_cast<int>(num_ranks));
      }
      Fail(own);  // or the other ranks would wait for this one
    }
    std::lock_guard lock(running->mutex);
    if (own && !running->failure) running->failure = own;
    --running->num_left;
    running->changed.notify_all();
  };
  try {
    for (size_t i = 1; i < num_ranks; ++i) crew_.Start(run_next);
  } catch (const std::bad_alloc&) {
    // This thread does the rest.
  }
  // Also those for which no thread has come: at the system's limit of threads none does,
  // and they have to fail as those that waited for them.
  while (running->next.load() < num_ranks) run_next();
  {
    std::unique_lock lock(running->mutex);
    running->changed.wait(lock, [&] { return running->num_left == 0; });
  }
  if (products) products->Wait();
  if (running->failure) std::rethrow_exception(running->failure);
}

// Each rank from a thread of its own, since what completes it runs the rest of its
// program; the last one from this thread, which has nothing else to do.
void Conductor::Complete(const std::shared_ptr<Gang>& gang,
                         std::exception_ptr failure,
                         bool inline_last) noexcept {
  if (failure) failure = FailureOf(gang->attributes->label, failure);
  const std::vector<Completion>& completions = gang->completions;
  const size_t last = completions.size() - 1;
  Queue<jax_ub::Run> runs;
  for (size_t i = 0; i < completions.size(); ++i) {
    gang->trace.OfRank(gang->RankOf(i))
        .Since(gang->calls[i].submitted_ns, TraceKind::kCall);
    if (inline_last && i == last) continue;
    runs.Push(completions[i].AsRun(failure));
  }
  if (!runs.empty()) crew_.Start(std::move(runs));
  if (inline_last) completions[last](failure);
}

void Conductor::Fail(const std::exception_ptr& reason) noexcept {
  communicator_->Poison(reason);
}

void Conductor::OnPoison(const std::exception_ptr& reason) noexcept {
  for (;;) {
    std::shared_ptr<Gang> gang;
    {
      std::lock_guard lock(mutex_);
      failure_ = reason;
      changed_.notify_all();
      if (complete_.empty()) break;
      gang = std::move(complete_.front());
      complete_.pop_front();
    }
    Complete(gang, reason, false);
  }
  hooks_.on_failure(*this, reason);
}

std::exception_ptr Conductor::FailureOf(const std::string& label,
                                        const std::exception_ptr& reason) const noexcept
    try {
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
  return reason;  // of another kind, or there is no memory for the text
}

std::exception_ptr Conductor::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Conductor::Close() {
  closing_thread_.store(std::this_thread::get_id());
  communicator_->Close();
}

int64_t Conductor::num_calls() const {
  std::lock_guard lock(mutex_);
  return next_call_;
}

}  // namespace jax_ub
