// Tests the source of the flag kernels on the host against the protocol.

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/launched_kernels.h"
#include "transport/cuda/flag_params.h"
#include "transport/cuda/multicast_params.h"

namespace jax_ub {

constexpr uint32_t kTag = 0xabcdef;
constexpr uint32_t kOtherTag = 0x123456;

// Returns the word of a flag of this call, or of the previous one.
constexpr uint64_t Word(uint64_t epoch, uint32_t tag = kTag) {
  return epoch << kTagBits | tag;
}

// The words in the heap of a rank that has ended `first_epoch` calls.
struct Rank {
  explicit Rank(uint64_t first_epoch) : epoch(Word(first_epoch)) {
    for (uint64_t& flag : arrived) flag = epoch;
    for (uint64_t& flag : freed) flag = epoch;
    for (uint64_t& flag : announced) flag = epoch;
  }

  RankWords words() {
    return {AddressOf(&epoch), AddressOf(&failed), AddressOf(&poison),
            AddressOf(&error)};
  }
  WaitParams Wait(uint64_t& flag, uint32_t ahead, uint64_t timeout_ns) {
    WaitParams params = {};
    params.waiting = {.own = words(),
                      .timeout_ns = timeout_ns,
                      .rank = 3,
                      .call = 11,
                      .tag = kTag,
                      .poisons = {}};
    params.ahead = ahead;
    params.num_flags = 1;
    params.flags[0] = {.flag = AddressOf(&flag),
                       .announced = AddressOf(&announced[5]),
                       .peer = 5,
                       .slot = 2,
                       .chunk = 7};
    return params;
  }
  SignalParams Signal(const std::vector<FlagTarget>& targets) {
    return {.own = words(), .tag = kTag, .signals = TargetsOf(targets)};
  }
  EndParams End(const std::vector<FlagTarget>& targets) {
    return {.own = words(),
            .rank = 3,
            .call = 11,
            .tag = kTag,
            .freed = TargetsOf(targets),
            .nan_fill = {}};
  }
  static FlagTargets TargetsOf(const std::vector<FlagTarget>& targets) {
    FlagTargets all = {};
    for (const FlagTarget& target : targets) all.targets[all.num_targets++] = target;
    return all;
  }

  uint64_t arrived[2];
  uint64_t freed[kMaxRanks];
  uint64_t announced[kMaxRanks];
  uint64_t epoch;
  uint64_t failed = 0;
  uint64_t poison = 0;
  ErrorRecord error = {};
};

constexpr uint64_t kLongNs = 60'000'000'000;
constexpr uint64_t kEpochs[] = {0, 41, UINT64_MAX - 1, UINT64_MAX};  // the low 40 bits

TEST(a_call_s_flags_are_one_ahead_of_the_epoch_also_around_zero) {
  for (uint64_t epoch : kEpochs) {
    Rank own(epoch);
    Rank peer(epoch);
    Launch(kSignalKernel,
           own.Signal({{AddressOf(&peer.arrived[1]), AddressOf(&peer.poison)}}), 1, 32);
    CHECK_EQ(peer.arrived[1], Word(epoch + 1));
    CHECK_EQ(peer.arrived[0], Word(epoch));
    CHECK_EQ(own.epoch, Word(epoch));
    Launch(kWaitKernel, peer.Wait(peer.arrived[1], 1, kLongNs), 1, 32);
    Launch(kWaitKernel, peer.Wait(peer.freed[0], 0, kLongNs), 1, 32);
    std::vector<FlagTarget> targets;
    for (int i = 1; i < kMaxRanks; ++i) {
      targets.push_back({AddressOf(&peer.freed[i]), AddressOf(&peer.poison)});
    }
    Launch(kEndKernel, own.End(targets), 1, 32);
    for (int i = 1; i < kMaxRanks; ++i) CHECK_EQ(peer.freed[i], Word(epoch + 1));
    CHECK_EQ(peer.freed[0], Word(epoch));
    CHECK_EQ(own.epoch, Word(epoch + 1));
    CHECK_EQ(peer.error.code + own.error.code + peer.poison, 0u);
  }
}

TEST(a_wait_sees_what_was_written_before_the_signal) {
  for (uint64_t epoch : kEpochs) {
    Rank own(epoch);
    Rank peer(epoch);
    int64_t data = 0;
    std::thread sender([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      data = 42;
      Launch(kSignalKernel,
             own.Signal({{AddressOf(&peer.arrived[0]), AddressOf(&peer.poison)}}), 1,
             32);
    });
    Launch(kWaitKernel, peer.Wait(peer.arrived[0], 1, kLongNs), 1, 32);
    CHECK_EQ(data, 42);
    sender.join();
    CHECK_EQ(peer.failed, 0u);
  }
}

TEST(a_wait_ends_at_its_deadline_and_says_what_it_waited_for) {
  Rank rank(9);
  constexpr uint64_t kTimeoutNs = 5'000'000;
  const auto began = std::chrono::steady_clock::now();
  Launch(kWaitKernel, rank.Wait(rank.arrived[0], 1, kTimeoutNs), 1, 32);
  CHECK(std::chrono::steady_clock::now() - began >=
        std::chrono::nanoseconds(kTimeoutNs));
  CHECK_EQ(rank.error.code, ErrorRecord::kDeadline);
  CHECK_EQ(rank.error.rank, 3u);
  CHECK_EQ(rank.error.peer, 5u);
  CHECK_EQ(rank.error.slot, 2u);
  CHECK_EQ(rank.error.chunk, 7);
  CHECK_EQ(rank.error.call, 11u);
  CHECK(rank.error.waited_ns >= kTimeoutNs);
  CHECK_EQ(rank.failed, 4u);  // 1 + its rank
  CHECK_EQ(rank.error.tag, 0u);
  // Later waits end at once, and keep the first error record.
  WaitParams later = rank.Wait(rank.arrived[0], 1, kLongNs);
  later.flags[0].peer = 6;
  Launch(kWaitKernel, later, 1, 32);
  CHECK_EQ(rank.error.peer, 5u);
}

TEST(the_host_ends_a_wait_that_has_begun) {
  Rank rank(9);
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic_ref(rank.error.poisoned).store(1);
  });
  Launch(kWaitKernel, rank.Wait(rank.freed[4], 0, kLongNs), 1, 32);
  CHECK_EQ(rank.error.code, ErrorRecord::kNone);  // freed[4] is there
  Launch(kWaitKernel, rank.Wait(rank.arrived[0], 1, kLongNs), 1, 32);
  host.join();
  CHECK_EQ(rank.error.code, ErrorRecord::kPoisoned);
}

// A peer that announces another call in another epoch may make this call later.
TEST(a_wait_is_not_satisfied_by_another_call) {
  for (const uint64_t other : {Word(10, kOtherTag), Word(9), Word(11), Word(11, 0)}) {
    Rank rank(9);
    rank.arrived[0] = other;
    rank.announced[5] = Word(other == Word(9) ? 9 : 11, kOtherTag);
    Launch(kWaitKernel, rank.Wait(rank.arrived[0], 1, 0), 1, 32);
    CHECK_EQ(rank.error.code, ErrorRecord::kDeadline);
  }
}

// Every kind of wait ends long before its deadline.
TEST(a_wait_ends_when_its_peer_announces_another_call) {
  for (const uint64_t epoch : kEpochs) {
    for (const uint32_t ahead : {0, 1}) {
      Rank rank(epoch);
      uint64_t poison = 0;
      WaitParams wait = rank.Wait(rank.freed[1], ahead, kLongNs);
      if (ahead == 0) rank.freed[1] = Word(epoch - 1);
      wait.waiting.poisons = {1, {AddressOf(&poison)}};
      std::thread peer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        std::atomic_ref(rank.announced[5]).store(Word(epoch + 1, kOtherTag));
      });
      Launch(kWaitKernel, wait, 1, 32);
      peer.join();
      CHECK_EQ(rank.error.code, ErrorRecord::kOtherCall);
      CHECK_EQ(rank.error.peer, 5u);
      CHECK_EQ(rank.error.tag, kTag);
      CHECK_EQ(rank.error.other_tag, kOtherTag);
      // Its peers receive both tags and forward them to the others.
      Rank informed(epoch);
      informed.poison = poison;
      Launch(kEndKernel, informed.End({{0, AddressOf(&poison)}}), 1, 32);
      CHECK_EQ(poison, rank.failed);
      CHECK_EQ(informed.error.code, ErrorRecord::kPeerFailed);
      CHECK_EQ(informed.error.peer, 3u);
      CHECK_EQ(informed.error.tag, kTag);
      CHECK_EQ(informed.error.other_tag, kOtherTag);
    }
  }
}

TEST(the_first_wait_of_a_call_announces_it_unless_the_rank_has_failed) {
  for (const bool has_failed : {false, true}) {
    Rank rank(9);
    uint64_t words[2] = {};
    WaitParams wait = rank.Wait(rank.freed[0], 0, kLongNs);
    wait.announcements = {2, {AddressOf(&words[0]), AddressOf(&words[1])}};
    if (has_failed) rank.failed = 4;
    Launch(kWaitKernel, wait, 1, 32);
    CHECK_EQ(words[0], has_failed ? 0 : Word(10));
    CHECK_EQ(words[1], words[0]);
  }
}

TEST(a_wait_signals_first_and_then_waits_for_every_flag) {
  Rank own(9);
  Rank peer(9);
  WaitParams wait = own.Wait(own.arrived[0], 1, kLongNs);
  wait.num_flags = 2;
  wait.flags[1] = wait.flags[0];
  wait.flags[1].flag = AddressOf(&own.arrived[1]);
  wait.signals =
      Rank::TargetsOf({{AddressOf(&peer.arrived[0]), AddressOf(&peer.poison)},
                       {AddressOf(&peer.arrived[1]), AddressOf(&peer.poison)}});
  std::thread answer([&] {  // one flag after the other, once both signals are there
    for (int i = 0; i < 2; ++i) {
      while (std::atomic_ref(peer.arrived[i]).load() != Word(10)) {
        std::this_thread::yield();
      }
    }
    for (int i = 0; i < 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      std::atomic_ref(own.arrived[i]).store(Word(10));
    }
  });
  Launch(kWaitKernel, wait, 1, 32);
  CHECK_EQ(std::atomic_ref(own.arrived[0]).load(), Word(10));
  CHECK_EQ(std::atomic_ref(own.arrived[1]).load(), Word(10));
  answer.join();
  CHECK_EQ(own.failed, 0u);
}

TEST(a_wait_for_several_flags_names_a_missing_peer) {
  for (const int missing : {0, 1}) {
    Rank own(9);
    own.arrived[1 - missing] = Word(10);
    WaitParams wait = own.Wait(own.arrived[0], 1, 5'000'000);
    wait.num_flags = 2;
    wait.flags[1] = {AddressOf(&own.arrived[1]), AddressOf(&own.announced[6]), 6, 1, 8};
    Launch(kWaitKernel, wait, 1, 32);
    CHECK_EQ(own.error.code, ErrorRecord::kDeadline);
    CHECK_EQ(own.error.peer, missing == 0 ? 5u : 6u);
    CHECK_EQ(own.error.slot, missing == 0 ? 2u : 1u);
    CHECK_EQ(own.error.chunk, missing == 0 ? 7 : 8);
  }
}

TEST(a_rank_that_failed_poisons_its_peers_instead_of_signalling) {
  Rank own(9);
  Rank peer(9);
  own.failed = 4;
  const FlagTarget to_peer = {AddressOf(&peer.arrived[0]), AddressOf(&peer.poison)};
  Launch(kSignalKernel, own.Signal({to_peer}), 1, 32);
  CHECK_EQ(peer.arrived[0], Word(9));
  CHECK_EQ(peer.poison, 4u);  // 1 + its rank
  peer.poison = 0;
  Launch(kEndKernel, own.End({to_peer}), 1, 32);
  CHECK_EQ(own.epoch, Word(9));
  CHECK_EQ(peer.poison, 4u);
  Launch(kWaitKernel, peer.Wait(peer.arrived[0], 1, kLongNs), 1, 32);
  CHECK_EQ(peer.error.code, ErrorRecord::kPeerFailed);
  CHECK_EQ(peer.error.peer, 3u);
  // Data that have arrived may be read; the end of the call reports whether they are
  // right.
  Rank third(9);
  third.poison = 4;
  third.arrived[0] = Word(10);
  Launch(kWaitKernel, third.Wait(third.arrived[0], 1, kLongNs), 1, 32);
  CHECK_EQ(third.failed, 0u);
}

TEST(a_failed_wait_notifies_all_peers_at_once) {
  Rank own(9);
  uint64_t poisons[3] = {};
  WaitParams wait = own.Wait(own.arrived[0], 1, 0);
  wait.waiting.poisons = {2, {AddressOf(&poisons[0]), AddressOf(&poisons[1])}};
  Launch(kWaitKernel, own.Wait(own.freed[0], 0, 0), 1, 32);
  CHECK_EQ(poisons[0] + poisons[1], 0u);
  Launch(kWaitKernel, wait, 1, 32);
  CHECK_EQ(poisons[0], 4u);
  CHECK_EQ(poisons[1], 4u);
  CHECK_EQ(poisons[2], 0u);
}

TEST(a_rank_that_a_peer_notifies_names_the_rank_that_failed_first_to_others) {
  Rank own(9);
  own.poison = 6;
  uint64_t poison = 0;
  WaitParams wait = own.Wait(own.arrived[0], 1, kLongNs);
  wait.waiting.poisons = {1, {AddressOf(&poison)}};
  Launch(kWaitKernel, wait, 1, 32);
  CHECK_EQ(own.failed, 6u);
  CHECK_EQ(poison, 6u);
  CHECK_EQ(own.error.code, ErrorRecord::kPeerFailed);
  CHECK_EQ(own.error.rank, 3u);
  CHECK_EQ(own.error.peer, 5u);
}

TEST(a_rank_that_receives_a_failure_before_its_call_ends_fails) {
  Rank own(9);
  Rank peer(9);
  own.poison = 6;
  Launch(kEndKernel, own.End({{AddressOf(&peer.freed[3]), AddressOf(&peer.poison)}}), 1,
         32);
  CHECK_EQ(own.failed, 6u);
  CHECK_EQ(own.epoch, Word(9));
  CHECK_EQ(peer.freed[3], Word(9));
  CHECK_EQ(peer.poison, 6u);
  CHECK_EQ(own.error.code, ErrorRecord::kPeerFailed);
  CHECK_EQ(own.error.rank, 3u);
  CHECK_EQ(own.error.peer, 5u);
  CHECK_EQ(own.error.call, 11u);
}

TEST(a_rank_that_runs_another_partition_fails_and_notifies_all_peers) {
  Rank own(9);
  uint64_t poisons[3] = {};
  uint32_t partition = 2;
  PartitionCheckParams place = {};
  place.own = own.words();
  place.partition = AddressOf(&partition);
  place.expected = 2;
  place.what.rank = 3;
  place.what.call = 11;
  place.peers.num_peers = 2;
  for (int i = 0; i < 2; ++i) place.peers.words[i] = AddressOf(&poisons[i]);
  Launch(kCheckPartitionKernel, place, 1, 32);
  CHECK_EQ(own.failed + own.error.code + poisons[0] + poisons[1], 0u);
  partition = 1;
  Launch(kCheckPartitionKernel, place, 1, 32);
  CHECK_EQ(own.failed, 4u);
  CHECK_EQ(own.error.code, ErrorRecord::kMisplaced);
  CHECK_EQ(own.error.rank, 3u);
  CHECK_EQ(own.error.call, 11u);
  CHECK_EQ(own.error.partition, 1u);
  CHECK_EQ(poisons[0], 4u);
  CHECK_EQ(poisons[1], 4u);
  CHECK_EQ(poisons[2], 0u);
  // The first error record is kept.
  partition = 0;
  Launch(kCheckPartitionKernel, place, 1, 32);
  CHECK_EQ(own.error.partition, 1u);
}

TEST(results_are_filled_with_nan_only_if_the_rank_failed) {
  for (size_t size : {1, 15, 16, 100}) {
    for (size_t shift : {0, 3}) {
      alignas(16) uint8_t bytes[160] = {};
      Rank rank(0);
      EndParams end = rank.End({});
      end.nan_fill = {1, {{AddressOf(bytes + 16 + shift), size}}};
      const NanFillParams more = {end.own, end.nan_fill};
      const auto is_filled = [&] {
        for (size_t i = 0; i < sizeof bytes; ++i) {
          const bool inside = i >= 16 + shift && i < 16 + shift + size;
          if (bytes[i] != (inside ? 0xff : 0)) return false;
        }
        return true;
      };
      Launch(kEndKernel, end, 1, 3);
      Launch(kFillNanKernel, more, 1, 3);
      for (uint8_t byte : bytes) CHECK_EQ(byte, 0);
      rank.poison = 1;  // of a peer, before the call ends
      Launch(kEndKernel, end, 1, 3);
      CHECK(is_filled());
      std::memset(bytes, 0, sizeof bytes);
      Launch(kFillNanKernel, more, 1, 3);
      CHECK(is_filled());
    }
  }
}

// The rank's data are wrong, and the peers may still read the memory of the sums.
TEST(a_rank_that_has_failed_sums_nothing_by_multicast) {
  const EmulatedMachine machine;  // no address is one of multicast
  uint64_t failed = 0;
  MulticastSumParams params = {};
  params.own.failed = AddressOf(&failed);
  params.end = 1;
  CHECK_THROWS(Launch(kMulticastSumKernel, params, 1, 32), "no multicast address");
  failed = 1;
  Launch(kMulticastSumKernel, params, 1, 32);
}

TEST(there_are_no_other_kernels) {
  CHECK(FindEmulatedKernel("jax_ub_none") == nullptr);
}

}  // namespace jax_ub

CHECK_MAIN()
