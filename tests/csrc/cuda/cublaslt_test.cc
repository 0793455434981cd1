// Tests the table of cuBLASLt functions: how it is filled, and the errors if it cannot
// be.
#include "gemm/cuda/cublaslt.h"

#include <map>
#include <string>
#include <vector>

#include "check.h"

namespace jax_ub {
namespace {

size_t Version13() { return 130100; }
size_t Version12() { return 120903; }
size_t Version11() { return 111103; }
const char* NameOfStatus(lt::Status) { return "CUBLAS_STATUS_INVALID_VALUE"; }

// Reads a fake library that lacks one function. The address of a function encodes its
// name.
CublasLt ReadFake(size_t (*version)(), const std::string& missing = "") {
  static std::map<std::string, int> names;
  return ReadCublasLt("/there/libcublasLt.so", [&](const char* name) -> void* {
    if (name == missing) return nullptr;
    if (name == std::string("cublasLtGetVersion")) {
      return reinterpret_cast<void*>(version);
    }
    return &names.emplace(name, 0).first->second;
  });
}

TEST(versions_12_and_13_are_read) {
  CHECK_EQ(ReadFake(&Version13).version, size_t{130100});
  CHECK_EQ(ReadFake(&Version12).version, size_t{120903});
  CHECK_EQ(ReadFake(&Version12).path, "/there/libcublasLt.so");
  CHECK_THROWS(
      ReadFake(&Version11),
      "/there/libcublasLt.so is cuBLASLt version 111103, jax_ub needs 12 or 13");
}

TEST(every_function_is_required_and_has_a_separate_entry) {
  const std::vector<std::string> names = {"GetVersion",
                                          "GetStatusName",
                                          "Create",
                                          "Destroy",
                                          "MatmulDescCreate",
                                          "MatmulDescDestroy",
                                          "MatmulDescSetAttribute",
                                          "MatrixLayoutCreate",
                                          "MatrixLayoutDestroy",
                                          "MatrixLayoutSetAttribute",
                                          "MatmulPreferenceCreate",
                                          "MatmulPreferenceDestroy",
                                          "MatmulPreferenceSetAttribute",
                                          "MatmulAlgoGetHeuristic",
                                          "Matmul"};
  for (const std::string& name : names) {
    CHECK_THROWS(ReadFake(&Version13, "cublasLt" + name),
                 "/there/libcublasLt.so has no cublasLt" + name + ": install");
  }
  const CublasLt fake = ReadFake(&Version13);
  const auto address = [](auto* function) { return reinterpret_cast<void*>(function); };
  CHECK(address(fake.Matmul) != address(fake.MatmulAlgoGetHeuristic));
  CHECK(address(fake.MatmulDescDestroy) != address(fake.MatrixLayoutDestroy));
}

TEST(a_missing_library_is_an_error_with_the_searched_paths) {
  const std::vector<std::string> directories = {"/nowhere/lib"};
  try {
    // The machine may have a cuBLASLt library.
    CHECK(LoadCublasLt(directories).version / 10000 >= 12);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    CHECK(text.find("no libcublasLt.so.13 or libcublasLt.so.12") != std::string::npos);
    CHECK(text.find("/nowhere/lib/libcublasLt.so.12") != std::string::npos);
  }
}

TEST(a_status_that_is_no_success_is_an_error_by_its_name) {
  CublasLt library;
  library.GetStatusName = &NameOfStatus;
  Check(library, lt::Status::kSuccess, "cublasLtMatmul");
  CHECK_THROWS(Check(library, lt::Status::kInvalidValue, "cublasLtMatmul"),
               "cublasLtMatmul: CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
