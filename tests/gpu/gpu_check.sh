#!/usr/bin/env bash
# The GPU check: one command on a machine with one NVIDIA GPU, without a network, under nine
# minutes. Builds from source with the packages that are there, unless prebuild.sh has left
# binaries in build/prebuilt ($PREBUILT); runs what needs a GPU, and measures what one GPU can show.
# Leaves gpu_check.log, *.json and verdicts.txt in $OUT, and the messages of the driver and
# of cuBLASLt in driver.log and cublaslt.log.
#
#   OUT=/tmp/gpu bash tests/gpu/gpu_check.sh
#
# A step that fails does not stop the ones after it; the exit status says whether any did.
# GPU_CHECK_ONLY='memcheck|8 processes' runs those steps, and what they need.
# Several processes that share a GPU are time-sliced: they show that results are right, and
# nothing about time.
set -uo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=${OUT:-$(mktemp -d)}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
limit_s=${GPU_CHECK_S:-530}
only="^(machine|build from source|verdicts)$|${GPU_CHECK_ONLY:-.}"
verdicts_s=15 # left for the last step
python=${PYTHON:-python3}
# Where pip has put cmake and ninja, and where CUDA has its tools.
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
PATH=$PATH:/usr/local/cuda/bin
failed=0
report=()

# step SECONDS NAME COMMAND...: runs it, for at most so long and no longer than is left.
step() {
  local most=$1 name=$2 begin=$SECONDS left=$((limit_s - verdicts_s - SECONDS)) status=ok rc
  local cut_short=$((left < most))
  shift 2
  printf '\n=== %s\n' "$name"
  if [[ ! $name =~ $only ]]; then
    status="not run"
  elif ((left < 10)); then
    status="no time"
    failed=1
  else
    timeout -k 3 $((most < left ? most : left)) "$@"
    rc=$?
    if ((rc == 77)); then
      status="not run"
    elif ((rc == 124 && cut_short)); then
      status="not finished"
      failed=1
    elif ((rc)); then
      status="FAILED ($rc)"
      failed=1
    fi
  fi
  report+=("$(printf '%-13s %4d s  %s' "$status" $((SECONDS - begin)) "$name")")
  echo "${report[-1]}"
}

machine() {
  date -u +%FT%TZ
  git -C "$top" describe --always --dirty 2>/dev/null
  nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv
  nvcc --version | tail -1
  "$python" - <<'PYTHON'
import importlib.metadata as metadata

for name in "jax jaxlib jax-cuda13-plugin nvidia-cublas nanobind cmake pytest".split():
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
PYTHON
}

build_all() {
  local prebuilt=${PREBUILT:-$top/build/prebuilt}
  if [[ -d $prebuilt ]]; then
    echo "from $prebuilt"
    cp "$prebuilt"/jax_ub/*.so "$top/jax_ub/"
    cp "$prebuilt"/gpu_ladder "$prebuilt"/*_bench "$build/"
    return
  fi
  cmake -S "$top/csrc" -B "$build" -G Ninja -DJAX_UB_CUDA=on -DJAX_UB_TESTS=ON \
    -DPython_EXECUTABLE="$(command -v "$python")" >"$out/cmake.log" 2>&1 ||
    { tail -20 "$out/cmake.log"; return 1; }
  : >"$out/build.log"
  build_target _cpu _cuda && cmake --install "$build" --prefix "$top" >>"$out/build.log" &&
    build_target gpu_ladder gpu_bench loopback_bench
}

build_target() {
  cmake --build "$build" --target "$@" >>"$out/build.log" 2>&1 ||
    { grep -A5 -E 'error|FAILED' "$out/build.log" | head -60; return 1; }
}

ub() { "$python" -m jax_ub "$@"; }

# ranks N [OPTION...]: so many processes on this one GPU; under $tool, if it is set. XLA
# times nothing there, and no process's compiler waits for what another one's has found.
ranks() {
  local n=$1
  shift
  # shellcheck disable=SC2086  # a command with its options
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_shard_autotuning=false" \
    XLA_PYTHON_CLIENT_PREALLOCATE=false \
    ${tool:-} "$python" -m jax_ub launch -n "$n" --timeout 110 tests/gpu/ranks.py \
    --share-gpu "$@"
}

# Command buffers for programs of any size, or for none.
captured() { XLA_FLAGS="--xla_gpu_graph_min_graph_size=1" "$@"; }
eager() { XLA_FLAGS="--xla_gpu_enable_command_buffer=" "$@"; }

# Multicast uses several GPUs. On a machine with one GPU, the only check is whether the GPU
# supports it.
multicast() {
  local gpus
  gpus=$("$python" -c 'from jax_ub._src.runtime import cuda_engine
print(sum(one["has_multicast"] for one in cuda_engine.load().devices()))') || return 1
  echo "GPUs with CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: $gpus"
  ((gpus > 1)) || { echo "NVLS needs two of them"; return 77; }
  JAX_UB_NVLS=1 ub launch -n 2 --timeout 80 tests/gpu/ranks.py --rounds 1 --dtypes 1
}

# sanitized TOOL [OPTION...]: a short case under compute-sanitizer, which looks at the
# engine's kernels: memcheck at every access, racecheck at those of shared memory (which they
# do not have). The tool may lose the exit status of the launcher, which runs nothing on a
# GPU: what the ranks print at their end says that they were right. Where the machine lets no
# tool look into its GPU (gVisor), nothing is checked.
sanitized() {
  local log="$out/$1.log" rc
  command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here"; return 77; }
  JAX_UB_TIMEOUT_S=45 \
    tool="compute-sanitizer --tool $* --target-processes all --error-exitcode 1 \
    --require-cuda-init no --kernel-name kernel_substring=jax_ub" \
    ranks 2 --rounds 1 --dtypes 1 --calls 2 --methods ring_exchange 2>&1 | tee "$log"
  rc=$?
  ! grep -q "Device not supported" "$log" || return 77
  ((rc == 0)) && grep -q "all right" "$log"
}
# Calls of the driver that XLA makes to see whether they fail are no errors.
memcheck() { sanitized memcheck --report-api-errors no; }
racecheck() { sanitized racecheck; }

# program NAME [ARGUMENT...]: a program of the build, with the folders of cuBLASLt, which is
# where pip installed it unless XLA has loaded it.
program() {
  local libraries
  libraries=$("$python" -c 'from jax_ub._src.runtime import cuda_engine; print(*cuda_engine.library_paths())')
  # shellcheck disable=SC2086  # one argument for each
  "$build/$1" "${@:2}" $libraries
}
benchmark() { program "$1" "$out/$1.json"; }

# against_xla NAME: calls of one GPU and XLA's, into NAME.json.
against_xla() {
  ub bench --platform cuda --devices 1 --dtypes bf16 --ops gemm,dgrad_add,wgrad_accumulate \
    --variants nn --shapes 8192x8192x8192 --rounds 9 --json "$out/$1.json"
}

# The same with the algorithms of cuBLASLt that tune measured as the fastest.
tuned_against_xla() {
  ub tune --platform cuda --tp 1 --shapes 8192x8192x8192 --output "$out/choices.json" &&
    JAX_UB_TUNED="$out/choices.json" against_xla tuned
}

export -f ub ranks captured eager multicast sanitized memcheck racecheck program benchmark machine \
  build_all build_target against_xla tuned_against_xla
export top out build python PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}"
# A wait that hangs says whom it waited for before its step's time is over. Ranks come to a
# call within seconds of each other: they compile the same programs.
export JAX_UB_TIMEOUT_S=20
# Where JAX finds no GPU it would run on the CPU, and all would be right.
export JAX_PLATFORMS=cuda
# The driver's reasons for its errors, and errors of cuBLASLt.
export CUDA_LOG_FILE="$out/driver.log"
export CUBLASLT_LOG_LEVEL=1 CUBLASLT_LOG_FILE="$out/cublaslt.log"

main() {
  cd "$top" || exit 1
  step 20 "machine" bash -c machine
  step 170 "build from source" bash -c build_all
  step 60 "ladder" bash -c 'program gpu_ladder'
  step 40 "doctor" bash -c 'ub doctor'
  step 80 "one process, captured" bash -c 'captured "$python" tests/gpu/local.py'
  step 110 "2 processes on one GPU, captured" bash -c 'captured ranks 2'
  step 60 "FP8 in one process" bash -c 'captured "$python" tests/gpu/local.py --fp8'
  step 70 "FP8 in 2 processes on one GPU" bash -c 'captured ranks 2 --fp8 --rounds 2'
  # Figures before what only repeats with more processes: those may be slow.
  step 60 "the engine's parts" bash -c 'benchmark gpu_bench'
  step 60 "a rank in loopback" bash -c 'benchmark loopback_bench'
  step 150 "against XLA" bash -c 'against_xla bench'
  step 150 "against XLA, tuned" bash -c tuned_against_xla
  step 70 "2 processes on one GPU, eager" bash -c 'eager ranks 2 --rounds 1 --dtypes 1'
  step 90 "4 processes on one GPU, captured" bash -c 'captured ranks 4 --rounds 1 --dtypes 1'
  step 110 "8 processes on one GPU, captured" bash -c 'captured ranks 8 --rounds 1 \
    --dtypes 1 --calls 2'
  step 90 "memcheck" bash -o pipefail -c memcheck
  step 60 "one process, eager" bash -c 'eager "$python" tests/gpu/local.py --short'
  step 90 "NVLS" bash -c multicast
  step 60 "racecheck" bash -o pipefail -c racecheck
  verdicts_s=0
  step 15 "verdicts" "$python" tests/gpu/verdicts.py "$out"
  printf '\n'
  printf '%s\n' "${report[@]}"
  printf '%d s in all; what is kept: %s\n' "$SECONDS" "$out"
  return "$failed"
}

mkdir -p "$out"
main 2>&1 | tee "$out/gpu_check.log"
exit "${PIPESTATUS[0]}"
