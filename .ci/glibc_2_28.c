// Defines the symbols of newer versions of glibc that libstdc++ 12 uses, for programs that
// are linked against glibc 2.28. See .ci/wheels.
#include <pthread.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

// Since glibc 2.32. If it is true, std::shared_ptr counts references without atomics.
HIDDEN char __libc_single_threaded = 0;

// Since glibc 2.30. Like libstdc++ without this function, it waits by the system's clock,
// which may be set. std::condition_variable ignores the result and reads `clock` itself.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition,
                                  pthread_mutex_t* mutex,
                                  clockid_t clock,
                                  const struct timespec* deadline) {
  const long second_ns = 1000000000;
  struct timespec now, system;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  system.tv_sec += deadline->tv_sec - now.tv_sec;
  system.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (system.tv_nsec < 0) {
    system.tv_nsec += second_ns;
    --system.tv_sec;
  } else if (system.tv_nsec >= second_ns) {
    system.tv_nsec -= second_ns;
    ++system.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &system);
}
