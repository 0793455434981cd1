// Hides a thread's accesses, and the order between threads that its locks create, from
// ThreadSanitizer. Otherwise the emulated driver's own locks would order work that CUDA
// leaves unordered, and hide a missing wait.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#endif

namespace jax_ub::emulated {

inline void BeginUnseen() {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}

inline void EndUnseen() {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
#endif
}

// Hides the thread while it exists. Must not be nested.
class Unseen {
 public:
  Unseen() { BeginUnseen(); }
  ~Unseen() { EndUnseen(); }
  Unseen(const Unseen&) = delete;
};

// Makes the thread visible again within an Unseen.
class Seen {
 public:
  Seen() { EndUnseen(); }
  ~Seen() { BeginUnseen(); }
  Seen(const Seen&) = delete;
};

}  // namespace jax_ub::emulated
