// Measures the time of a barrier between processes, and the part of it that is waiting.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "processes.h"

namespace jax_ub {
namespace {

const std::string kLabel = "barrier";

void Bench(int num_processes) {
  constexpr int kNumBatches = 200;
  constexpr int kBatch = 500;
  Bulletin bulletin;
  std::vector<int> process_of_rank;
  for (int p = 0; p < num_processes; ++p) process_of_rank.push_back(p);
  Processes processes(num_processes, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, process_of_rank);
    std::vector<double> us;
    int64_t call = 0;
    for (int batch = 0; batch < kNumBatches; ++batch) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kBatch; ++i) ranks->Barrier(call++, 0, {kLabel, 0, 60});
      us.push_back(SecondsSince(begin) * 1e6 / kBatch);
    }
    std::sort(us.begin(), us.end());
    if (process == 0) {
      std::cout << num_processes << " processes: " << us[kNumBatches / 2]
                << " us a barrier (median of " << kNumBatches << " times " << kBatch
                << "; quartiles " << us[kNumBatches / 4] << " to "
                << us[3 * kNumBatches / 4] << ")" << std::endl;
    }
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

int main() {
  for (const int num_processes : {2, 3, 4}) jax_ub::Bench(num_processes);
  return check::num_failures == 0 ? 0 : 1;
}
