// Tests the signatures that ranks publish before they run a call, in any order, in one
// process and in several, on the emulated driver.
#include "transport/cuda/signature_table.h"

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/cuda_calls.h"
#include "cuda/gpu_member.h"
#include "platform/error.h"

namespace jax_ub {
namespace {

GpuCallSignature Ready(int rank,
                       const std::string& call,
                       const std::string& site = "f") {
  return {.rank = rank, .site = site, .call = call};
}
GpuCallSignature Refused(int rank, const std::string& call) {
  return {.rank = rank, .site = "f", .call = call, .rejection = "no"};
}

TEST(RanksAgreeInAnyOrderAndNothingIsKept) {
  SignatureTable decision(3);
  for (const int rank : {2, 0, 1}) CHECK(!decision.Add(Ready(rank, "A")));
  CHECK_EQ(decision.num_open(), 0);
  // A rank may be several calls ahead of another rank, and call sites are matched
  // separately.
  CHECK(!decision.Add(Ready(0, "B")));
  CHECK(!decision.Add(Ready(0, "C")));
  CHECK(!decision.Add(Ready(1, "D", "g")));
  CHECK(!decision.Add(Ready(2, "B")));
  CHECK_EQ(decision.num_open(), 2);
  const auto other = decision.Add(Ready(2, "B"));
  CHECK(other && *other == Ready(0, "C"));
}

TEST(ACallThatAllRanksRejectIsNoMismatch) {
  SignatureTable decision(2);
  CHECK(!decision.Add(Refused(0, "A")));
  CHECK(!decision.Add(Refused(1, "A")));
  CHECK(!decision.Add(Refused(0, "A")));
  const auto other = decision.Add(Ready(1, "A"));
  CHECK(other && *other == Refused(0, "A"));
}

TEST(ASignatureIsUnpackedAsItWasPacked) {
  const GpuCallSignature said{
      .rank = 3, .site = "jit_f/1", .call = "A", .rejection = "x\ny"};
  CHECK(GpuCallSignature::Unpack(said.Pack()) == said);
  CHECK(GpuCallSignature::Unpack(Ready(0, "").Pack()) == Ready(0, ""));
  for (const char* nonsense : {"", "1", "f\n", "two"}) {
    CHECK(!GpuCallSignature::Unpack(nonsense));
  }
  CHECK(!GpuCallSignature::Unpack(std::string("one\0f\0A\0", 8)));
}

CallAttributes GatherMatmul(Method method = Method::kRingExchange) {
  CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, method, 2);
  at.channel = "jit_f/0";
  return at;
}

// Runs `function` in two processes with one GPU and one rank each.
Processes RunTwo(AddressExchange& addresses,
                 const std::function<void(GpuMember&)>& function) {
  return RunOnGpus(addresses, {{0, 1}}, {}, function);
}

// Runs the call if it is not rejected; then initializes it until that fails, which is
// soon, and returns the reason.
std::string WithLabel(Gpus& gpus, GpuCalls& calls) {
  const int rank = calls.local_ranks()[0];
  const auto begin = std::chrono::steady_clock::now();
  bool has_run = false;
  std::string text;
  do {
    try {
      calls.Initialize(rank);
      if (!has_run) calls.Execute(rank);
      has_run = true;
    } catch (const std::exception& error) {
      text = error.what();
      if (SaysWhy(text)) break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (SecondsSince(begin) < kAtOnceS);
  gpus.Synchronize();
  return text;
}

TEST(ProcessesWithEqualSignaturesRun) {
  AddressExchange addresses;
  Processes processes = RunTwo(addresses, [](GpuMember& member) {
    Gpus& gpus = member.gpus();
    GpuCalls first(gpus, GatherMatmul(), {}, DType::kF32, 1, member.placement());
    GpuCalls second(gpus, GatherMatmul(), {}, DType::kF32, 2, member.placement());
    for (int i = 0; i < 3; ++i) {
      for (GpuCalls* calls : {&first, &second}) calls->RunAll();
    }
    gpus.Synchronize();
    for (GpuCalls* calls : {&first, &second}) CheckRight(*calls);
    CHECK(gpus.engine().Failures().empty());
  });
  CheckAllWell(processes);
}

// Both processes report each difference with the same text, in any order of arrival.
TEST(ProcessesWithDifferentSignaturesNameBoth) {
  struct Case {
    std::string first, second;
    std::function<void(CallAttributes&, jax_ub_test::Sizes&, DType&)> change;
  };
  const std::vector<Case> cases = {
      {"by ring_exchange", "by external",
       [](auto& at, auto&, auto&) { at.method = Method::kExternal; }},
      {"f32[", "bf16[", [](auto&, auto&, auto& dtype) { dtype = DType::kBF16; }},
      {"f32[2, 5, 7]", "f32[2, 5, 8]", [](auto&, auto& sizes, auto&) { ++sizes.k; }},
      {"num_kernels 1", "allow_tf32 1",
       [](auto& at, auto&, auto&) { at.kernel_options.allow_tf32 = true; }},
  };
  for (const Case& one : cases) {
    for (const int late : {0, 1}) {
      AddressExchange addresses;
      Processes processes = RunTwo(addresses, [&](GpuMember& member) {
        CallAttributes at = GatherMatmul();
        jax_ub_test::Sizes sizes = {};
        DType dtype = DType::kF32;
        if (member.process() == 1) one.change(at, sizes, dtype);
        GpuCalls calls(member.gpus(), at, sizes, dtype, 1, member.placement());
        if (member.process() == late) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        throw Error(WithLabel(member.gpus(), calls));
      });
      const std::vector<std::string> texts = processes.Join();
      CHECK_EQ(texts[0], texts[1]);
      CHECK(Contains(texts[0], NameOf(0, processes.pid(0)) + " and " +
                                   NameOf(1, processes.pid(1)) + " do not agree: "));
      CHECK(Contains(texts[0], one.first));
      CHECK(Contains(texts[0], one.second));
    }
  }
}

// Otherwise the two processes would report different errors.
TEST(AStoppedProcessDoesNotChangeTheSignature) {
  AddressExchange addresses;
  Processes processes = RunTwo(addresses, [&](GpuMember& member) {
    const int process = member.process();
    const Method method = process == 0 ? Method::kRingExchange : Method::kExternal;
    GpuCalls calls(member.gpus(), GatherMatmul(method), {}, DType::kF32, 1,
                   member.placement());
    if (process == 1) {
      calls.Initialize(1);
      ++addresses.bulletin.word();
      Hang();
    }
    addresses.bulletin.WaitForWord(2);  // process 1 is stopped
    const std::string text = WithLabel(member.gpus(), calls);
    ++addresses.bulletin.word();
    throw Error(text);
  });
  addresses.bulletin.WaitForWord(1);
  processes.Signal(1, SIGSTOP);
  waitpid(processes.pid(1), nullptr, WUNTRACED);
  ++addresses.bulletin.word();
  addresses.bulletin.WaitForWord(3);
  processes.Signal(1, SIGKILL);
  CHECK(Contains(processes.Join()[0], NameOf(0, processes.pid(0)) + " and " +
                                          NameOf(1, processes.pid(1)) +
                                          " do not agree: "));
}

TEST(ARefusalOfOneProcessReachesTheOther) {
  for (const int late : {0, 1}) {
    AddressExchange addresses;
    Processes processes = RunTwo(addresses, [&](GpuMember& member) {
      Gpus& gpus = member.gpus();
      const int process = member.process();
      GpuCalls calls(gpus, GatherMatmul(), {}, DType::kF32, 1, member.placement());
      calls.Workspace(process);
      if (process == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (process == 1) {
        gpus.machine.Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_THROWS(calls.Initialize(1), "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY");
      }
      throw Error(WithLabel(gpus, calls));
    });
    const std::vector<std::string> texts = processes.Join();
    CHECK_EQ(texts[0], texts[1]);
    CHECK(Contains(texts[0], NameOf(1, processes.pid(1)) + " rejected the call that " +
                                 NameOf(0, processes.pid(0)) + " is ready for: "));
    CHECK(Contains(texts[0], "all_gather_matmul by ring_exchange"));
    CHECK(Contains(texts[0], "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY"));
  }
}

// The errors are: no algorithm, no room in the heap, a call that does not fit.
TEST(ACallThatAllProcessesRejectKeepsTheCommunicator) {
  AddressExchange addresses;
  Processes processes = RunTwo(addresses, [](GpuMember& member) {
    Gpus& gpus = member.gpus();
    const int process = member.process();
    GpuCalls calls(gpus, GatherMatmul(), {}, DType::kF32, 1, member.placement());
    // The engine keeps that there is no algorithm for this shape.
    GpuCalls refused(gpus, GatherMatmul(), {1, 4, 8, 8}, DType::kF32, 1,
                     member.placement());
    RefuseEmulatedMatmuls(true);
    CHECK_THROWS(refused.Initialize(process), "has no algorithm");
    RefuseEmulatedMatmuls(false);
    CallAttributes gather = MakeAttributes(Op::kAllGather, Method::kRingExchange, 2);
    gather.channel = "jit_f/1";
    GpuCalls large(gpus, gather, {1, 3000, 1000, 1}, DType::kF32, 1,
                   member.placement());
    CHECK_THROWS(large.Initialize(process), "do not fit into a heap");
    RankCall wrong = calls.on_device(process);
    wrong.operands[1].rows = 6;
    CHECK_THROWS(gpus.engine().Initialize(calls.site, 0, wrong), "w is f32[6, 3]");
    calls.RunAll();
    gpus.Synchronize();
    CheckRight(calls);
    CHECK(gpus.engine().Failures().empty());
  });
  CheckAllWell(processes);
}

TEST(DevicesOfOneProcessHaveToAgreeToo) {
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, GatherMatmul(), {}, DType::kF32, 1);
  GpuCalls wider(gpus, GatherMatmul(), {2, 5, 4, 3}, DType::kF32, 1);
  calls.Initialize(0);
  calls.Execute(0);
  const auto initialize = [&] {
    gpus.engine().Initialize(calls.site, 1, wider.on_device(1));
  };
  CHECK_THROWS(initialize(), "rank 0 and rank 1 do not agree: ");
  gpus.Synchronize();
  CHECK_EQ(calls.NumNumbers(0), 0);
  CHECK_THROWS(calls.Initialize(0), "rank 0 and rank 1 do not agree: ");
}

TEST(ADeviceThatIsNotReadyFailsTheOthersOfItsProcess) {
  // The first part fails the preparation of its GEMMs, the second its heap: then no
  // rank gets a heap before all ranks know the reason.
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, GatherMatmul(), {}, DType::kF32, 1);
  gpus.machine.Fail("MemCreate", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS(calls.Initialize(0), "CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_THROWS(calls.Initialize(1), "CUDA_ERROR_OUT_OF_MEMORY");
  calls.RunAll();
  gpus.Synchronize();
  CHECK_EQ(calls.NumWrong(), 0);

  GpuCalls others(gpus, GatherMatmul(), {2, 6, 6, 3}, DType::kF32, 1);
  others.Initialize(0);
  others.Execute(0);
  gpus.machine.Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS(others.Initialize(1), "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY");
  gpus.Synchronize();
  CHECK_EQ(others.NumNumbers(0), 0);
  const std::string text =
      "rank 1 rejected the call that rank 0 is ready for: all_gather_matmul";
  CHECK_THROWS(others.Initialize(0), text);
  CHECK_THROWS(others.Initialize(1), text);
}

// Other addresses need other plans, after the peers have received that the rank is
// ready.
TEST(ARankThatWasReadyAndFailsLaterFailsTheOthers) {
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, GatherMatmul(), {2, 8, 8, 3}, DType::kF32, 1);
  calls.RunAll();
  gpus.Synchronize();
  RankCall elsewhere = calls.on_device(1);
  elsewhere.operands[1].data += 4;
  gpus.machine.Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS(gpus.engine().Initialize(calls.site, 1, elsewhere), "cuMemAlloc");
  CHECK_THROWS(calls.Initialize(0), "rank 1 failed: cuMemAlloc");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
