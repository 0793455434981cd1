# Builds the CUDA engine. CMakeLists.txt includes this file if JAX_UB_CUDA is auto or on.
# The C++ compiler compiles the host code, with the types of cuda.h. nvcc only compiles
# kernels. The driver and cuBLASLt are loaded at run time, so nothing links to CUDA, and
# the build needs no GPU.

# Sets JAX_UB_NVCC and JAX_UB_CUDA_INCLUDE_DIR. If something is missing, sets the variable
# named by `missing` to a text that says what was not found.
function(jax_ub_find_cuda missing)
  file(GLOB toolkits /usr/local/cuda /usr/local/cuda-*)
  list(SORT toolkits COMPARE NATURAL ORDER DESCENDING)
  find_program(JAX_UB_NVCC nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS ${toolkits} PATH_SUFFIXES bin
    DOC "NVIDIA's compiler")
  if(NOT JAX_UB_NVCC)
    set(${missing} "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*" PARENT_SCOPE)
    return()
  endif()
  # nvcc may be a script that runs another nvcc. The headers are in the TOP directory that
  # the other nvcc prints.
  execute_process(COMMAND "${JAX_UB_NVCC}" --dryrun -x cu -fatbin -o /dev/null /dev/null
    ERROR_VARIABLE dryrun OUTPUT_VARIABLE ignored COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "TOP=([^\n]*)" line "${dryrun}")
  find_path(JAX_UB_CUDA_INCLUDE_DIR cuda.h HINTS "${CMAKE_MATCH_1}/include"
    DOC "Directory that holds cuda.h")
  if(NOT JAX_UB_CUDA_INCLUDE_DIR)
    set(${missing} "no cuda.h near ${JAX_UB_NVCC}" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS "${JAX_UB_CUDA_INCLUDE_DIR}/cuda.h" line REGEX "#define CUDA_VERSION ")
  string(REGEX MATCH "[0-9]+" version "${line}")
  if(version LESS 12040)
    set(${missing} "cuda.h in ${JAX_UB_CUDA_INCLUDE_DIR} is ${version}, not 12040 or newer"
      PARENT_SCOPE)
  endif()
endfunction()

# Compiles `file` for the architecture `oldest` and for the newer architectures in
# jax_ub_architectures. Embeds the fatbin as `extern const unsigned char SYMBOL[];` in
# namespace jax_ub, which a Library loads.
function(jax_ub_kernels symbol file oldest)
  cmake_path(GET file STEM name)
  set(generate "-gencode=arch=compute_${oldest},code=[sm_${oldest},compute_${oldest}]")
  foreach(number ${jax_ub_architectures})
    if(number GREATER oldest)
      list(APPEND generate "-gencode=arch=compute_${number},code=sm_${number}")
    endif()
  endforeach()
  set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.fatbin")
  set(embedded "${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.cc")
  file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/kernels")
  add_custom_command(OUTPUT "${fatbin}"
    COMMAND "${JAX_UB_NVCC}" -fatbin -std=c++20 -O3 ${generate} ${jax_ub_nvcc_flags}
      "-I${CMAKE_CURRENT_SOURCE_DIR}" -MD -MF "${fatbin}.d" -o "${fatbin}"
      "${CMAKE_CURRENT_SOURCE_DIR}/${file}"
    DEPENDS "${file}" DEPFILE "${fatbin}.d" VERBATIM COMMAND_EXPAND_LISTS)
  set(embed "${CMAKE_CURRENT_SOURCE_DIR}/platform/cuda/embed.cmake")
  add_custom_command(OUTPUT "${embedded}"
    COMMAND "${CMAKE_COMMAND}" "-Dfrom=${fatbin}" "-Dto=${embedded}" "-Dsymbol=${symbol}"
      -P "${embed}"
    DEPENDS "${fatbin}" "${embed}" VERBATIM)
  target_sources(jax_ub_cuda PRIVATE "${embedded}")
endfunction()

jax_ub_find_cuda(missing)
if(missing AND JAX_UB_CUDA STREQUAL "on")
  message(FATAL_ERROR "JAX_UB_CUDA is on, and the CUDA part cannot be built: ${missing}")
elseif(missing)
  message(STATUS "CUDA: not built (${missing}); -DJAX_UB_CUDA=on makes that an error")
  return()
endif()
message(STATUS "CUDA: ${JAX_UB_NVCC}, headers in ${JAX_UB_CUDA_INCLUDE_DIR}")

# The architectures for which the library has machine code, if this nvcc knows them. Code
# for sm_100 also runs on 10.3, and code for sm_120 on 12.1; code for sm_100a and sm_120a
# would not. For other GPUs, such as 11.0, the driver compiles the PTX.
execute_process(COMMAND "${JAX_UB_NVCC}" --list-gpu-code
  OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
# Sanitized builds are for emulated GPUs, which run no machine code.
set(jax_ub_architectures)
foreach(number 80 90 100 120)
  if(known MATCHES "sm_${number}\n" AND NOT JAX_UB_SANITIZE)
    list(APPEND jax_ub_architectures ${number})
  endif()
endforeach()
set(jax_ub_nvcc_flags)
if(JAX_UB_WERROR)
  list(APPEND jax_ub_nvcc_flags
    -Werror=all-warnings "-Xptxas=--warn-on-spills,--warning-as-error")
endif()

jax_ub_library(jax_ub_cuda
  SOURCES
    engine/cuda/cuda_engine.cc
    engine/cuda/first_run.cc
    engine/cuda/gpu.cc
    engine/cuda/initialize.cc
    engine/cuda/dry_run_device.cc
    engine/cuda/multicast_reduce.cc
    engine/cuda/one_kernel_reduce.cc
    engine/cuda/stream_device.cc
    engine/cuda/stream_lanes.cc
    gemm/cuda/fp8_scale_kernels.cc
    gemm/cuda/cublaslt.cc
    gemm/cuda/cuda_gemm.cc
    gemm/cuda/fp8_operands.cc
    gemm/cuda/fp8_support.cc
    gemm/cuda/gemm_blocks.cc
    gemm/cuda/gemm_plan_cache.cc
    platform/cuda/driver.cc
    platform/cuda/owners.cc
    reduce/cuda/sum_kernels.cc
    transport/cuda/all_reduce_kernel.cc
    transport/cuda/signature_table.cc
    transport/cuda/communicator.cc
    transport/cuda/cuda_slots.cc
    transport/cuda/endpoint.cc
    transport/cuda/fault.cc
    transport/cuda/flag_kernels.cc
    transport/cuda/group_heaps.cc
    transport/cuda/multicast.cc
    transport/cuda/multicast_kernels.cc
    transport/cuda/capabilities.cc
    transport/cuda/sharing.cc
    transport/cuda/virtual_memory.cc
  DEPENDS jax_ub_engine ${CMAKE_DL_LIBS})
target_include_directories(jax_ub_cuda SYSTEM PUBLIC "${JAX_UB_CUDA_INCLUDE_DIR}")
jax_ub_kernels(kFlagKernels transport/cuda/flag_kernels.cu 80)
jax_ub_kernels(kFp8ScaleKernels gemm/cuda/fp8_scale_kernels.cu 80)
jax_ub_kernels(kSumKernels reduce/cuda/sum_kernels.cu 80)
jax_ub_kernels(kAllReduceKernels transport/cuda/all_reduce_kernel.cu 80)
jax_ub_kernels(kMulticastKernels transport/cuda/multicast_kernels.cu 90)

if(TARGET jax_ub_ffi)
  jax_ub_library(jax_ub_cuda_ffi
    SOURCES
      ffi/cuda/handlers.cc
      ffi/cuda/process_engine.cc
    DEPENDS jax_ub_cuda jax_ub_ffi)
endif()

if(JAX_UB_PYTHON)
  jax_ub_module(_cuda module_cuda.cc jax_ub_cuda_ffi)
endif()
