// A small test registry. TEST(Name) { CHECK(...); } defines a test; the program runs
// all tests, or those whose names contain its argument, and returns whether they
// passed.
#pragma once

#include <atomic>
#include <cmath>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer ends the program, or a forked child, at the first data race. Ignored
// are races in the destructor of an exception by its last owner: libstdc++ counts the
// owners with atomics that are not instrumented. Exits do not wait a second for races
// in other threads, since some tests fork hundreds of processes.
extern "C" {
[[gnu::used, gnu::visibility("default")]] inline const char* __tsan_default_options() {
  return "halt_on_error=1:atexit_sleep_ms=0";
}
[[gnu::used, gnu::visibility("default")]] inline const char*
__tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
}
#endif

namespace jax_ub {

// Tests take at most 8 ranks and every case; under sanitizers, unless JAX_UB_ALL_SIZES is
// on, at most 4 ranks and every fifth case.
constexpr int kMaxTestRanks = JAX_UB_TEST_MAX_RANKS;
constexpr int kCaseStep = JAX_UB_TEST_CASE_STEP;

}  // namespace jax_ub

namespace check {

struct Test {
  std::string name;
  void (*run)();
};

inline std::vector<Test> tests;
inline std::atomic<int> num_failures = 0;

inline bool Register(const char* name, void (*run)()) {
  tests.push_back({name, run});
  return true;
}

template <typename... Parts>
void Fail(const char* file, int line, const Parts&... parts) {
  ++num_failures;
  (std::cerr << file << ":" << line << ": " << ... << parts) << std::endl;
}

// Returns the text of an exception; "" if the pointer is null.
inline std::string TextOf(const std::exception_ptr& reason) {
  if (!reason) return "";
  try {
    std::rethrow_exception(reason);
  } catch (const std::exception& error) {
    return error.what();
  }
}

inline int RunAll(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (const Test& test : tests) {
    if (test.name.find(wanted) == std::string::npos) continue;
    const int before = num_failures;
    try {
      test.run();
    } catch (const std::exception& error) {
      Fail(__FILE__, __LINE__, "unexpected exception: ", error.what());
    }
    std::cout << (num_failures == before ? "ok   " : "FAIL ") << test.name << std::endl;
  }
  return num_failures == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                    \
  static void name();                                                 \
  static const bool registered_##name = check::Register(#name, name); \
  static void name()
#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) check::Fail(__FILE__, __LINE__, "not so: " #condition); \
  } while (false)
#define CHECK_EQ(a, b)                                                        \
  do {                                                                        \
    const auto check_a = (a);                                                 \
    const auto check_b = (b);                                                 \
    if (!(check_a == check_b))                                                \
      check::Fail(__FILE__, __LINE__, #a " is ", check_a, ", not ", check_b); \
  } while (false)
#define CHECK_NEAR(a, b, tolerance)                                                 \
  do {                                                                              \
    const double check_a = (a), check_b = (b), check_t = (tolerance);               \
    if (!(std::abs(check_a - check_b) <= check_t))                                  \
      check::Fail(__FILE__, __LINE__, #a " is ", check_a, ", not within ", check_t, \
                  " of ", check_b);                                                 \
  } while (false)
#define CHECK_THROWS(statement, text)                                           \
  do {                                                                          \
    std::string check_what = "nothing was thrown";                              \
    try {                                                                       \
      statement;                                                                \
    } catch (const std::exception& error) {                                     \
      check_what = error.what();                                                \
    }                                                                           \
    if (check_what.find(text) == std::string::npos)                             \
      check::Fail(__FILE__, __LINE__, "'", check_what, "' lacks '", text, "'"); \
  } while (false)
#define CHECK_MAIN() \
  int main(int argc, char** argv) { return check::RunAll(argc, argv); }
