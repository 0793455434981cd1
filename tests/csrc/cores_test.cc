// The crew's cores: threads that compute at the same time sit apart.
#include "engine/cores.h"

#include <optional>

#include "check.h"

namespace jax_ub {
namespace {

cpu_set_t Allowed() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return allowed;
}

TEST(SecondThreadOnACoreMovesToAnother) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to move to
  // One thread asks twice, so that both certainly are on the same core.
  Cores cores;
  std::optional<Cores::Seat> first(cores);
  const cpu_set_t alone = Allowed();
  CHECK(CPU_EQUAL(&alone, &before));
  {
    Cores::Seat second(cores);
    const cpu_set_t moved = Allowed();
    CHECK(CPU_COUNT(&moved) == CPU_COUNT(&before) - 1);
    CHECK(CPU_ISSET(sched_getcpu(), &moved));
  }
  const cpu_set_t after = Allowed();
  CHECK(CPU_EQUAL(&after, &before));
}

TEST(ThreadsStayWhereEveryCoreIsTaken) {
  const cpu_set_t before = Allowed();
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(sched_getcpu(), &only);
  CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
  Cores cores;
  Cores::Seat first(cores);
  {
    Cores::Seat second(cores);
    const cpu_set_t now = Allowed();
    CHECK(CPU_EQUAL(&now, &only));
  }
  sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
