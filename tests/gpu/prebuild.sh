#!/usr/bin/env bash
# Builds the binaries of the GPU check on a machine that needs no GPU, into build/prebuilt,
# where gpu_check.sh looks for them before it builds. PYTHON has to have the GPU machine's
# Python version, with nanobind, cmake, ninja and the jaxlib of that machine.
#
#   PYTHON=python3.12 tests/gpu/prebuild.sh
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
build=${BUILD:-$top/build/gpu}
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
cmake -S "$top/csrc" -B "$build" -G Ninja -DJAX_UB_CUDA=on -DJAX_UB_TESTS=ON \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')"
cmake --build "$build" --target _cpu _cuda gpu_ladder gpu_bench loopback_bench
cmake --install "$build" --prefix "$top/build/prebuilt" --strip
cp "$build"/{gpu_ladder,gpu_bench,loopback_bench} "$top/build/prebuilt/"
