// Hides what a thread does from ThreadSanitizer: its accesses, and the order that its
// locks make between threads. The emulated driver's own locks would otherwise order work
// that CUDA leaves unordered, and so hide a wait that is missing.
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

// Not nested.
class Unseen {
 public:
  Unseen() { BeginUnseen(); }
  ~Unseen() { EndUnseen(); }
  Unseen(const Unseen&) = delete;
};

// A part of an Unseen that is seen.
class Seen {
 public:
  Seen() { EndUnseen(); }
  ~Seen() { BeginUnseen(); }
  Seen(const Seen&) = delete;
};

}  // namespace jax_ub::emulated
