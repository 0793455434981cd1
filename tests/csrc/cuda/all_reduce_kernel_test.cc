// Tests the source of the kernel that all-reduces few rows, on the host: the ranks run
// it concurrently, and the result is compared with the CPU engine's sum.
#include "transport/cuda/all_reduce_kernel.h"

#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/launched_kernels.h"
#include "random_gemm.h"
#include "reduce/reduce.h"
#include "transport/cuda/all_reduce_params.h"

namespace jax_ub {
namespace {

constexpr uint32_t kTag = 0xabcdef;
constexpr uint64_t kLongNs = 60'000'000'000;

struct alignas(kFlagLineBytes) Line {
  uint64_t word = 0;
};

// Elements in memory that begins at a multiple of 16 bytes, or one element after it.
class Elements {
 public:
  Elements(int64_t count, DType dtype, bool shifted, Random& random)
      : units_((count + 1) * SizeOf(dtype) / sizeof(Unit) + 2),
        offset_(shifted ? SizeOf(dtype) : 0),
        size_bytes_(count * SizeOf(dtype)) {
    for (int64_t i = 0; i < count; ++i) {
      Write(data() + i * SizeOf(dtype), dtype, RandomValue(random, Values::kNormal));
    }
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(units_.data()) + offset_; }
  std::string bytes() {
    return {reinterpret_cast<const char*>(data()), static_cast<size_t>(size_bytes_)};
  }

 private:
  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  std::vector<Unit> units_;
  int64_t offset_;
  int64_t size_bytes_;
};

struct Shape {
  int num_ranks = 2;
  int64_t rows = 1;
  int64_t columns = 1;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  bool shifted = false;
};

// A rank with its flags, slots and operands. Slot d - 1 is filled by the rank that is d
// behind.
struct Rank {
  Rank(const Shape& shape, Random& random)
      : arrived((shape.num_ranks - 1) * kMaxAllReduceBlocks),
        freed(shape.num_ranks),
        announced(shape.num_ranks),
        partial(shape.rows * shape.columns, shape.dtype, shape.shifted, random),
        out(shape.rows * shape.columns, shape.out_dtype, shape.shifted, random) {
    for (int slot = 0; slot < shape.num_ranks - 1; ++slot) {
      slots.emplace_back(shape.rows * shape.columns, shape.dtype, false, random);
    }
  }
  RankWords words() {
    return {AddressOf(&epoch.word), AddressOf(&failed.word), AddressOf(&poison.word),
            AddressOf(&error)};
  }

  std::vector<Line> arrived, freed, announced;
  Line epoch, failed, poison;
  ErrorRecord error = {};
  Elements partial, out;
  std::vector<Elements> slots;
};

class Ranks {
 public:
  Ranks(const Shape& shape, uint64_t seed)
      : shape_(shape),
        random_(seed),
        bias_(shape.columns, DType::kBF16, true, random_),
        residual_(shape.rows * shape.columns, DType::kF32, shape.shifted, random_) {
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      ranks_.emplace_back(shape, random_);
  }

  Rank& operator[](int rank) { return ranks_[rank]; }

  AllReduceParams ParamsOf(int own, uint64_t timeout_ns = kLongNs) {
    AllReduceParams params = {};
    Rank& rank = ranks_[own];
    params.waiting.own = rank.words();
    params.waiting.timeout_ns = timeout_ns;
    params.waiting.rank = own;
    params.waiting.tag = kTag;
    params.is_aligned = shape_.shifted ? 0 : 1;
    params.dtype = shape_.dtype;
    params.out_dtype = shape_.out_dtype;
    params.num_elements = shape_.rows * shape_.columns;
    params.partial = AddressOf(rank.partial.data());
    params.out = AddressOf(rank.out.data());
    params.num_addends = 2;
    params.addends[0] = {AddressOf(bias_.data()), shape_.columns, DType::kBF16};
    params.addends[1] = {AddressOf(residual_.data()), params.num_elements, DType::kF32};
    for (int other = 0; other < shape_.num_ranks; ++other) {
      if (other == own) continue;
      Rank& peer = ranks_[other];
      const int from = (own - other + shape_.num_ranks) % shape_.num_ranks - 1;
      const int to = (other - own + shape_.num_ranks) % shape_.num_ranks - 1;
      const auto flag = [&](Line& line) {
        return AwaitedFlag{.flag = AddressOf(&line.word),
                           .announced = AddressOf(&rank.announced[other].word),
                           .peer = static_cast<uint32_t>(other),
                           .slot = static_cast<uint32_t>(from),
                           .chunk = -1};
      };
      params.waiting.poisons.words[params.waiting.poisons.num_peers++] =
          AddressOf(&peer.poison.word);
      params.peers[params.num_peers++] = {
          .announcement = AddressOf(&peer.announced[own].word),
          .to = AddressOf(peer.slots[to].data()),
          .signal = AddressOf(&peer.arrived[to].word),
          .freed = flag(rank.freed[other]),
          .from = AddressOf(rank.slots[from].data()),
          .arrived = flag(rank.arrived[from])};
    }
    return params;
  }

  // Returns the bytes of the sum.
  std::string Expected() {
    std::vector<ConstMatrix> parts;
    for (Rank& rank : ranks_) {
      parts.push_back({rank.partial.data(), shape_.columns, shape_.dtype});
    }
    parts.push_back({bias_.data(), 0, DType::kBF16});
    parts.push_back({residual_.data(), shape_.columns, DType::kF32});
    Elements sums(shape_.rows * shape_.columns, shape_.out_dtype, false, random_);
    SumChunks(parts, shape_.rows, shape_.columns,
              {sums.data(), shape_.columns, shape_.out_dtype});
    return sums.bytes();
  }

 private:
  const Shape shape_;
  Random random_;
  Elements bias_, residual_;
  std::vector<Rank> ranks_;
};

void Launch(const AllReduceParams& params, int num_blocks, int num_threads) {
  Launch(kAllReduceKernel, params, num_blocks, num_threads);
}

TEST(AnAllReduceHasTheCpusBits) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    const Shape shape = {.num_ranks = static_cast<int>(Pick(random, 2, 10)),
                         .rows = Pick(random, 1, 9),
                         .columns = Pick(random, 1, 90),
                         .dtype = static_cast<DType>(Pick(random, 0, 2)),
                         .out_dtype = static_cast<DType>(Pick(random, 0, 2)),
                         .shifted = Pick(random, 0, 1) == 1};
    Ranks ranks(shape, seed);
    const int num_blocks = static_cast<int>(Pick(random, 1, 4));
    const int num_threads = static_cast<int>(Pick(random, shape.num_ranks, 40));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      threads.emplace_back([&, params = ranks.ParamsOf(rank)] {
        Launch(params, num_blocks, num_threads);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const std::string expected = ranks.Expected();
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      CHECK_EQ(ranks[rank].failed.word, 0u);
      if (ranks[rank].out.bytes() == expected) continue;
      check::Fail(__FILE__, __LINE__, "seed ", seed, ", rank ", rank, " differs");
    }
  }
}

// The peer's slots still have the data of its previous call.
TEST(NothingIsPushedBeforeThePeerHasFreedItsSlots) {
  const Shape shape = {.rows = 2, .columns = 40};
  Ranks ranks(shape, 1);
  ranks[0].freed[1].word = uint64_t{1} << kTagBits;
  const std::string before = ranks[1].slots[0].bytes();
  Launch(ranks.ParamsOf(0, 0), 2, 32);
  CHECK(ranks[1].slots[0].bytes() == before);
  CHECK_EQ(ranks[1].arrived[0].word, 0u);
  CHECK_EQ(ranks[0].error.code, ErrorRecord::kDeadline);
  CHECK_EQ(ranks[0].error.peer, 1u);
  CHECK_EQ(ranks[1].poison.word, 1u);  // 1 + its rank
}

TEST(AnAllReduceNamesAMissingPeer) {
  Ranks ranks({.num_ranks = 3, .rows = 2, .columns = 40}, 1);
  std::thread other([&, params = ranks.ParamsOf(1)] { Launch(params, 2, 32); });
  Launch(ranks.ParamsOf(0, 20'000'000), 2, 32);
  other.join();
  CHECK_EQ(ranks[0].error.code, ErrorRecord::kDeadline);
  CHECK_EQ(ranks[0].error.peer, 2u);
  CHECK_EQ(ranks[0].error.slot, 0u);
  CHECK_EQ(ranks[0].error.chunk, -1);
  CHECK_EQ(ranks[1].error.code, ErrorRecord::kPeerFailed);
  CHECK_EQ(ranks[1].error.peer, 0u);
  CHECK(ranks[2].poison.word != 0);
}

TEST(AnAllReduceEndsWhenAPeerAnnouncesAnotherCall) {
  Ranks ranks({.rows = 2, .columns = 40}, 1);
  ranks[0].announced[1].word = (uint64_t{1} << kTagBits) + kTag + 1;
  Launch(ranks.ParamsOf(0), 1, 32);
  CHECK_EQ(ranks[0].error.code, ErrorRecord::kOtherCall);
  CHECK_EQ(ranks[1].announced[0].word, (uint64_t{1} << kTagBits) + kTag);
}

TEST(ARankThatHasFailedPushesAndSignalsNothing) {
  Ranks ranks({.rows = 2, .columns = 40}, 1);
  ranks[0].failed.word = 1;
  const std::string before = ranks[1].slots[0].bytes();
  Launch(ranks.ParamsOf(0), 2, 32);
  CHECK(ranks[1].slots[0].bytes() == before);
  CHECK_EQ(ranks[1].arrived[0].word + ranks[1].announced[0].word, 0u);
}

TEST(BlocksAreFewAndTheSameOnEveryRank) {
  CHECK_EQ(AllReduceKernel::NumBlocks(0), 1);
  CHECK_EQ(AllReduceKernel::NumBlocks(4096), 1);
  CHECK_EQ(AllReduceKernel::NumBlocks(4097), 2);
  CHECK_EQ(AllReduceKernel::NumBlocks(int64_t{1} << 40), kMaxAllReduceBlocks);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
