// Makes the creation of threads fail, for tests.
#pragma once

#include <pthread.h>

#include "check.h"

namespace jax_ub {

// While an instance exists, no thread can be created, because the default stack is
// larger than the address space.
class NoThreadStarts {
 public:
  NoThreadStarts() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 48);
    CHECK_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreadStarts() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreadStarts(const NoThreadStarts&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace jax_ub
