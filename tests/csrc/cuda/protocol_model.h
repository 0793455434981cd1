// Explores every order in which the operations of the ranks can run: an explicit-state
// search over the programs that CudaSlots enqueues. Flags are changed and awaited by
// the real kernel code on real memory; slots are modelled as cells that contain the
// number of a piece.  An operation is one atomic step. This is sufficient: if a read or
// write that takes time could overlap another write, some order runs that write before
// or after it, and the read then finds a wrong piece. Flags are accessed with acquire
// and release, and the search shows that no data race is left, so the orders are all
// possible behaviours (sequential consistency of data-race-free programs).  A reduction
// by multicast is modelled as a product that writes cells of its own rank, a sum that
// reads and writes a cell of every rank, and a copy that reads cells of its own rank,
// each of which is one step.  `kEager` runs flag kernels as soon as they can continue,
// and branches on copies and reads only. This covers all results: a wait that can end
// stays so until it ends, since the rank that would write its flag next waits for a
// later operation of the waiting rank; and a kernel that ends early never prevents an
// operation that was possible before.  With `kFailures`, every wait may also reach its
// deadline. The rank then continues, sends no more signals, and its results are NaN.
// Therefore data that a rank reads are checked only if it ends the call without a
// failure. All data that a failed rank writes are wrong for their readers: chunks that
// it forwards and sums that it stores at all ranks. A rank that reads a flag earlier
// learns of a failure earlier, so flags are read in every order.  With `kMisplaced`, no
// wait reaches its deadline: a rank fails if it is misplaced or is notified, and all
// ranks of the call must fail. With `kOtherOrder`, ranks make the calls in different
// orders; all ranks must fail without a deadline, and every error record has the tags
// of two calls.  What a wait signals, and what it announces, are separate steps before
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/recorded_program.h"

namespace jax_ub {

// What executes a call.
enum class Reduction { kSchedule, kMulticast, kOneKernel };

// A call that all ranks make together.
struct ModelCall {
  RankSchedules schedules;
  Reduction reduction = Reduction::kSchedule;
  // [rank]: whether its device executes the partition of another rank; empty: no check
  // is enqueued.
  std::vector<bool> is_misplaced = {};
};

enum class Search { kEager, kWhole, kFailures, kMisplaced, kOtherOrder };

class ProtocolModel {
 public:
  // `orders` [rank]: the indices of the calls that the rank makes, in order; empty:
  // every rank makes all calls in order.
  ProtocolModel(const std::vector<ModelCall>& calls,
                uint64_t first_epoch,
                const std::vector<std::vector<int>>& orders = {})
      : num_ranks_(static_cast<int>(calls.at(0).schedules.size())),
        first_epoch_(first_epoch),
        errors_(num_ranks_) {
    for (size_t call = 0; call < calls.size(); ++call) {
      const int num_slots = calls[call].schedules[0].num_slots;
      num_slots_ = std::max(num_slots_, num_slots);
      // Slots have 2, 3, 1, 2, ... cells.
      slot_bytes_.push_back(kSlotAlignment * (1 + (call + 1) % 3));
      num_cells_ = std::max<int64_t>(num_cells_,
                                     num_slots * slot_bytes_.back() / kSlotAlignment);
    }
    num_lines_ = num_slots_ + 2 * num_ranks_ + 3;
    lines_.resize(num_ranks_ * num_lines_);
    PlaceRanks();
    Record(calls, orders);
  }

  std::vector<RankProgram>& programs() { return programs_; }

  // Returns a description of an error that occurs in some order; "" if there is none.
  std::string Explore(Search search) {
    search_ = search;
    Visit(FirstState());
    while (!todo_.empty() && wrong_.empty()) {
      const State state = *todo_.back();
      todo_.pop_back();
      bool moved = false;
      for (int rank = 0; rank < num_ranks_; ++rank) {
        moved |= TryConcurrent(state, rank);
        moved |= TryLane(state, rank, false);
        if (search_ == Search::kFailures) moved |= TryLane(state, rank, true);
      }
      if (!moved) CheckDone(state);
    }
    return wrong_;
  }

 private:
  // For each rank: index of the next operation of its lane, concurrent operations that
  // are done (four bytes), whether it has read a wrong piece, flag lines, cells.
  using State = std::string;
  struct alignas(kFlagLineBytes) Line {
    uint64_t word;
  };
  static constexpr size_t kMisread = 5;
  static constexpr size_t kProgressBytes = 6;
  static constexpr size_t kLineBytes = 2;
  static constexpr int kModelTagBits = 4;
  static constexpr PieceId kNoPiece = 255;  // that anybody means
  // An address that is far from all real memory.
  static constexpr CUdeviceptr kFirstSlot = CUdeviceptr{1} << 60;
  static constexpr CUdeviceptr kRankBytes = CUdeviceptr{1} << 32;

  size_t rank_bytes() const {
    return kProgressBytes + kLineBytes * num_lines_ + num_cells_;
  }
  size_t At(int rank) const { return rank * rank_bytes(); }
  uint8_t Next(const State& state, int rank) const { return state[At(rank)]; }
  uint32_t Done(const State& state, int rank) const {
    uint32_t done;
    std::memcpy(&done, &state[At(rank) + 1], sizeof done);
    return done;
  }

  void PlaceRanks() {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto line = [&](int n) {
        return reinterpret_cast<CUdeviceptr>(&lines_[rank * num_lines_ + n]);
      };
      places_.push_back({.slots = kFirstSlot + rank * kRankBytes,
                         .arrived = line(0),
                         .freed = line(num_slots_),
                         .announced = line(announced_line()),
                         .epoch = line(failed_line() - 1),
                         .failed = line(failed_line()),
                         .poison = line(failed_line() + 1)});
    }
  }

  void Record(const std::vector<ModelCall>& calls,
              const std::vector<std::vector<int>>& orders) {
    std::vector<int> in_a_row(calls.size());
    std::iota(in_a_row.begin(), in_a_row.end(), 0);
    const Driver driver = RecordingDriver();
    const FlagKernels kernels(driver);
    std::map<Piece, PieceId> pieces;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto error = reinterpret_cast<CUdeviceptr>(&errors_[rank]);
      Recorder recorder(driver, kernels, places_, error, pieces);
      for (const int call : orders.empty() ? in_a_row : orders[rank]) {
        recorder.set_call(call);
        const Schedule& schedule = calls[call].schedules[rank];
        if (!calls[call].is_misplaced.empty()) {
          recorder.CheckPartition(schedule, !calls[call].is_misplaced[rank]);
        }
        switch (calls[call].reduction) {
          case Reduction::kSchedule:
            recorder.Call(schedule, slot_bytes_[call]);
            break;
          case Reduction::kMulticast:
            recorder.CallByMulticast(schedule, slot_bytes_[call]);
            break;
          case Reduction::kOneKernel:
            recorder.CallInOneKernel(schedule, slot_bytes_[call]);
            break;
        }
      }
      programs_.push_back(recorder.program());
      SplitWaits(programs_.back());
    }
  }

  // Makes the signals that a wait sends first an operation of their own. They are sent
  // once, and the wait is tried again and again.
  static void SplitWaits(RankProgram& program) {
    for (size_t i = 0; i < program.lane.size(); ++i) {
      if (program.lane[i].kernel == nullptr) continue;
      if (program.lane[i].kernel->name != kWaitKernel) continue;
      auto& wait = *reinterpret_cast<WaitParams*>(program.lane[i].params.data());
      if (wait.signals.num_targets == 0) continue;
      const SignalParams sent = {wait.waiting.own, wait.waiting.tag, wait.signals};
      wait.signals.num_targets = 0;
      Operation signal = program.lane[i];  // with its dependencies
      signal.kernel = FindEmulatedKernel(kSignalKernel);
      const auto* const bytes = reinterpret_cast<const std::byte*>(&sent);
      signal.params.assign(bytes, bytes + sizeof(sent));
      program.lane.insert(program.lane.begin() + static_cast<ptrdiff_t>(i), signal);
      for (ConcurrentWork& work : program.concurrent)
        work.after += work.after > i ? 1 : 0;
      ++i;
    }
  }

  // Two bytes per line. A flag: its distance from the first epoch, and its tag.
  // `failed` and `poison`: the rank, and both tags.
  State FirstState() const { return State(num_ranks_ * rank_bytes(), '\0'); }
  bool IsFlag(int line) const { return line < failed_line(); }
  uint64_t WordOf(int line, uint8_t first, uint8_t second) const {
    if (IsFlag(line)) return (first_epoch_ + first) << kTagBits | second;
    const uint64_t tag = second & 0xf;
    const uint64_t other_tag = second >> kModelTagBits;
    return first | tag << kFailedRankBits | other_tag << (kFailedRankBits + kTagBits);
  }
  void FromWord(int line, uint64_t word, char* bytes) const {
    if (IsFlag(line)) {
      bytes[0] = static_cast<char>((word >> kTagBits) - first_epoch_);
      bytes[1] = static_cast<char>(word & kTagMask);
    } else {
      bytes[0] = static_cast<char>(word & kFailedRankMask);
      bytes[1] =
          static_cast<char>((word >> kFailedRankBits & kTagMask) |
                            word >> (kFailedRankBits + kTagBits) << kModelTagBits);
    }
  }
  size_t LineAt(int rank, int n) const {
    return At(rank) + kProgressBytes + kLineBytes * n;
  }
  void ToMemory(const State& state) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      for (int n = 0; n < num_lines_; ++n) {
        const char* bytes = &state[LineAt(rank, n)];
        lines_[rank * num_lines_ + n].word = WordOf(n, bytes[0], bytes[1]);
      }
    }
  }
  void FromMemory(State& state, int begin, int end) const {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      for (int n = begin; n < end; ++n) {
        FromWord(n, lines_[rank * num_lines_ + n].word, &state[LineAt(rank, n)]);
      }
    }
  }

  char* Cells(State& state, CUdeviceptr address) const {
    const CUdeviceptr offset = address - kFirstSlot;
    return &state[At(static_cast<int>(offset / kRankBytes)) + kProgressBytes +
                  kLineBytes * num_lines_ + offset % kRankBytes / kSlotAlignment];
  }

  void Use(State& state,
           int rank,
           const std::vector<Content>& reads,
           const std::vector<Content>& writes) {
    CheckReads(state, rank, reads);
    const bool has_misread = state[At(rank) + kMisread] != 0;
    for (const Content& write : writes) {
      std::memset(Cells(state, write.slots), has_misread ? kNoPiece : write.piece,
                  write.size_bytes / kSlotAlignment);
    }
  }

  void CheckReads(State& state, int rank, const std::vector<Content>& reads) {
    for (const Content& read : reads) {
      const char* cells = Cells(state, read.slots);
      for (int64_t i = 0; i < read.size_bytes / kSlotAlignment; ++i) {
        if (static_cast<PieceId>(cells[i]) == read.piece) continue;
        if (search_ == Search::kFailures || MustAllFail()) {
          state[At(rank) + kMisread] = 1;
          continue;
        }
        wrong_ = "rank " + std::to_string(rank) + " reads piece " +
                 std::to_string(static_cast<PieceId>(cells[i])) + " where it means " +
                 std::to_string(read.piece);
      }
    }
  }

  int announced_line() const { return num_slots_ + num_ranks_; }
  int failed_line() const { return num_slots_ + 2 * num_ranks_ + 1; }
  bool HasFailed(const State& state, int rank) const {
    return state[LineAt(rank, failed_line())] != 0;
  }
  bool MustAllFail() const {
    return search_ == Search::kMisplaced || search_ == Search::kOtherOrder;
  }

  // Runs a kernel on the memory of the state, and returns the code with which the rank
  // fails.
  uint32_t RunOnMemory(const State& state, int rank, const Operation& launch) {
    ToMemory(state);
    errors_[rank] = {};
    launch.kernel->run(launch.params.data(), 1, 32);
    return errors_[rank].code;
  }

  // Returns the launches that wait for one flag each, if the launch waits for several:
  // its threads wait concurrently.
  static std::vector<Operation> ThreadsOf(const Operation& launch) {
    const std::string_view name = launch.kernel->name;
    if (name == kWaitKernel)
      return ThreadsOf(launch, &WaitParams::num_flags, &WaitParams::flags);
    if (name == kAwaitFreePhase || name == kAwaitPhase) {
      return ThreadsOf(launch, &AllReduceParams::num_peers, &AllReduceParams::peers);
    }
    return {launch};
  }
  template <typename Params, typename Flags>
  static std::vector<Operation> ThreadsOf(const Operation& launch,
                                          uint32_t Params::* count,
                                          Flags Params::* flags) {
    const Params& wait = *reinterpret_cast<const Params*>(launch.params.data());
    std::vector<Operation> threads(wait.*count, launch);
    for (uint32_t i = 0; i < wait.*count; ++i) {
      Params& one = *reinterpret_cast<Params*>(threads[i].params.data());
      one.*count = 1;
      (one.*flags)[0] = (wait.*flags)[i];
    }
    return threads;
  }

  // Runs a kernel; returns false if it waits. A wait reads its flags once, since its
  // timeout is zero; `expires` makes it reach its deadline.
  bool RunKernel(State& state, int rank, const Operation& launch, bool expires) {
    const Operation* late = nullptr;
    const std::vector<Operation> threads = ThreadsOf(launch);
    uint32_t code = ErrorRecord::kNone;
    for (const Operation& thread : threads) {
      code = RunOnMemory(state, rank, thread);
      if (code != ErrorRecord::kDeadline) {
        if (code != ErrorRecord::kNone) break;
      } else {
        late = &thread;
      }
    }
    const bool fails = code != ErrorRecord::kNone && code != ErrorRecord::kDeadline;
    if (!fails && late != nullptr && !expires) {
      FromMemory(state, announced_line(), announced_line() + num_ranks_);
      return false;
    }
    if (expires != (!fails && late != nullptr)) return false;
    if (expires) RunOnMemory(state, rank, *late);
    FromMemory(state, 0, num_lines_);
    if (fails && search_ == Search::kOtherOrder) CheckTags(rank);
    if (launch.kernel->name == kEndKernel && state[At(rank) + kMisread] != 0 &&
        !HasFailed(state, rank)) {
      wrong_ = "rank " + std::to_string(rank) +
               " has not failed, and read another piece than it means";
    }
    return true;
  }

  void CheckTags(int rank) {
    const ErrorRecord& error = errors_[rank];
    if (error.tag != 0 && error.other_tag != 0 && error.tag != error.other_tag) return;
    wrong_ = "rank " + std::to_string(rank) + " does not know which calls differ";
  }

  // Returns whether the rank's next operation ran, or changed the state before it
  // waited.
  bool TakeNext(State& state, int rank, bool flags_only, bool expires) {
    const std::vector<Operation>& lane = programs_[rank].lane;
    const uint8_t next = Next(state, rank);
    if (next == lane.size()) return false;
    const Operation& operation = lane[next];
    if ((operation.needs & ~Done(state, rank)) != 0) return false;
    if (!operation.uses_slots()) {
      const State before = state;
      if (!RunKernel(state, rank, operation, expires)) return state != before;
    } else if (flags_only || expires) {
      return false;
    } else if (operation.kernel == nullptr || !HasFailed(state, rank)) {
      Use(state, rank, operation.reads, operation.writes);
    }
    state[At(rank)] = static_cast<char>(next + 1);
    return true;
  }

  void TakeFlags(State& state) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < num_ranks_; ++rank) {
        while (TakeNext(state, rank, true, false)) moved = true;
      }
    }
  }

  bool TryLane(const State& state, int rank, bool expires) {
    State next = state;
    if (!TakeNext(next, rank, false, expires)) return false;
    Visit(std::move(next));
    return true;
  }

  bool TryConcurrent(const State& state, int rank) {
    bool moved = false;
    const std::vector<ConcurrentWork>& concurrent = programs_[rank].concurrent;
    for (size_t i = 0; i < concurrent.size(); ++i) {
      const uint32_t done = Done(state, rank);
      if ((done >> i & 1) != 0 || concurrent[i].after > Next(state, rank)) continue;
      State next = state;
      Use(next, rank, concurrent[i].reads, concurrent[i].writes);
      const uint32_t now_done = done | 1u << i;
      std::memcpy(&next[At(rank) + 1], &now_done, sizeof now_done);
      Visit(std::move(next));
      moved = true;
    }
    return moved;
  }

  void Visit(State state) {
    if (search_ == Search::kEager) TakeFlags(state);
    const auto [place, is_new] = visited_.insert(std::move(state));
    if (is_new) todo_.push_back(&*place);
  }

  void CheckDone(const State& state) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (Next(state, rank) == programs_[rank].lane.size()) continue;
      wrong_ = "rank " + std::to_string(rank) + " waits for ever";
    }
    for (int rank = 0; rank < num_ranks_ && MustAllFail(); ++rank) {
      if (HasFailed(state, rank) || !wrong_.empty()) continue;
      wrong_ = "rank " + std::to_string(rank) + " has not failed, but a peer " +
               (search_ == Search::kMisplaced ? "is misplaced" : "made another call");
    }
  }

  const int num_ranks_;
  const uint64_t first_epoch_;
  int num_slots_ = 0;
  int64_t num_cells_ = 0;
  int num_lines_ = 0;
  std::vector<int64_t> slot_bytes_;  // [call]
  std::vector<Line> lines_;          // [rank][line]
  std::vector<ErrorRecord> errors_;
  std::vector<RankSlotAddress> places_;
  std::vector<RankProgram> programs_;
  Search search_ = Search::kEager;
  std::unordered_set<State> visited_;
  std::vector<const State*> todo_;
  std::string wrong_;
};

}  // namespace jax_ub
