# shellcheck shell=bash disable=SC2034
# The steps that .ci/run and .ci/nightly share. Both source this file. The steps work on
# copies of the checkout in $work, one for each version of Python.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
plain=$work/py3.11/build/cpp-plain
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_QUIET=2
# With it, every process of the tests compiles the Python files of $work.
unset PYTHONDONTWRITEBYTECODE
touch "$work/report"

# step NAME COMMAND...: runs it, reports the seconds it took and whether it passed.
step() {
  local name=$1 begin=$SECONDS status=ok rc
  shift
  printf '\n=== %s\n' "$name"
  set +e
  (set -e; "$@")
  rc=$?
  set -e
  if ((rc == 77)); then
    status="not run"
  elif ((rc)); then
    status="FAILED"
  fi
  printf '%-8s %5d s  %s\n' "$status" $((SECONDS - begin)) "$name" | tee -a "$work/report"
}

# at_once FUNCTION FUNCTION: runs two functions that run steps at the same time, so that no
# core is idle while a step waits for the network, a deadline or its last test. The output
# of the second function follows the output of the first one.
at_once() {
  "$2" >"$work/second.log" 2>&1 &
  "$1"
  wait $!
  cat "$work/second.log"
}

# Whether a step has failed.
failed() { grep -q ^FAILED "$work/report"; }

# Ends a step whose tool is missing, with the reason.
not_run() { echo "not run: $1"; exit 77; }

# with_tool COMMAND PACKAGE...: installs the packages if the command is not there.
with_tool() {
  local tool=$1
  shift
  command -v "$tool" >/dev/null && return
  { ((EUID == 0)) && command -v apt-get >/dev/null; } || not_run "no $tool here"
  apt-get update -qq >/dev/null 2>&1 || true
  DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "$@" >"$work/apt.log" 2>&1 ||
    { tail -5 "$work/apt.log"; not_run "apt-get has no $tool"; }
}

# use_python 3.12: makes `python3` that version, with pyenv where the default is another.
use_python() {
  local version
  if [[ $(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') != "$1" ]]; then
    command -v pyenv >/dev/null || not_run "python3 is not Python $1"
    version=$(pyenv versions --bare | grep -x "${1//./\\.}\.[0-9]*" | tail -1) ||
      not_run "no Python $1"
    export PYENV_VERSION=$version
  fi
  python3 --version
}

# fresh_tree NAME: copies the files that git does not ignore.
fresh_tree() {
  mkdir -p "$work/$1"
  (cd "$top" && git -c safe.directory='*' ls-files -coz --exclude-standard |
    xargs -0 cp --parents -t "$work/$1")
}

# readme_command NAME: the one line of the block after `<!-- command: NAME -->`.
readme_command() {
  awk -v mark="<!-- command: $1 -->" '
    $0 == mark { marked = 1; next }
    marked && /^```/ { if (inside) exit; inside = 1; next }
    inside { print }' "$top/README.md"
}

# Lets README's commands, the wheel and the C++ tests share compiled files through ccache.
# The cache keys a file by its path relative to the build folder, which is two levels below
# the tree everywhere, and by the compiler's name: pip's builds take g++, and CMake alone takes
# c++. It repeats a file's warnings.
share_compilations() {
  (with_tool ccache ccache) || { echo "everything is compiled each time"; return 0; }
  export CXX=g++ CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_IGNOREOPTIONS=-Werror
  export CCACHE_DIR=$work/ccache CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
}

# readme VERSION NAME: runs that command in the tree of that Python.
readme() {
  local command
  command=$(readme_command "$2")
  [[ -n $command && $command != *$'\n'* ]] || { echo "README.md has no command $2"; exit 1; }
  use_python "$1"
  share_compilations
  cd "$work/py$1"
  echo "\$ $command"
  bash -c "$command"
}

# extra NAME...: prints the requirements of these extras of pyproject.toml.
extra() {
  "$work/py3.11/.venv/bin/python" - "$@" <<'PYTHON'
import sys, tomllib

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(r for name in sys.argv[1:] for r in extras[name]), sep="\n")
PYTHON
}

tools() {
  cd "$work/py3.11"
  extra lint build >"$work/tools.txt"
  .venv/bin/pip install -r "$work/tools.txt"
}

# cpp NAME [CMAKE OPTION...]: builds the C++ tests and runs them.
cpp() {
  local build=$work/py3.11/build/cpp-$1 bin=$work/py3.11/.venv/bin
  shift
  (($#)) || share_compilations  # with options nothing else is compiled alike
  export PATH=$bin:$PATH
  cmake -S "$work/py3.11/csrc" -B "$build" -G Ninja -DJAX_UB_PYTHON=OFF -DJAX_UB_TESTS=ON \
    -DJAX_UB_WERROR=ON -DJAX_UB_XLA_INCLUDE_DIR="$(xla_include)" "$@" >"$build.log" ||
    { cat "$build.log"; exit 1; }
  cmake --build "$build" >"$build.made" || { tail -n 30 "$build.made"; exit 1; }
  ! grep -B 3 -A 9 'warning:' "$build.made" || exit 1  # of a compilation without -Werror
  # Three at a time on two cores, since many tests wait for deadlines instead of computing.
  ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel 3
}

xla_include() {
  "$work/py3.11/.venv/bin/python" -c 'import jax; print(jax.ffi.include_dir())'
}

run_bazel() {
  with_tool bazel bazel-bootstrap bazel-rules-java
  cd "$work/py3.11"
  export JAX_UB_XLA_INCLUDE_DIR JAX_UB_BAZEL_WORKSPACE=$work/bazel
  JAX_UB_XLA_INCLUDE_DIR=$(xla_include)
  trap '.bazel/run.sh shutdown' EXIT
  .bazel/run.sh "$1" --jobs="$(nproc)" --noshow_progress "${@:2}"
}

# all_run ARGUMENT...: runs tests whose tools were just installed. A skipped test is an error.
all_run() {
  .venv/bin/pytest -q -rs "$@" | tee "$work/all_run.txt"
  ! grep -q SKIPPED "$work/all_run.txt"
}
