#!/usr/bin/env bash
# Runs Bazel on this checkout: .bazel/run.sh test //...
#
# Bazel requires its files at the top of a workspace, but in this repository they are in
# .bazel. Therefore this script makes a workspace of links next to Bazel's other output.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(dirname "$here")
workspace=${JAX_UB_BAZEL_WORKSPACE:-${TMPDIR:-/tmp}/jax_ub-bazel-$(id -u)-$(cksum <<<"$top" | cut -d' ' -f1)}

mkdir -p "$workspace"
ln -sfn "$here" "$workspace/.bazel"
for name in MODULE.bazel WORKSPACE .bazelrc; do
  ln -sfn "$here/workspace/$name" "$workspace/$name"
done
for name in BUILD csrc tests; do ln -sfn "$top/$name" "$workspace/$name"; done
cd "$workspace"

command=$1
shift
flags=()
# Debian's Bazel is 4.2.3 and calls itself `no_version`. It downloads nothing: local
# repositories replace the ones that it would download.
if [[ $(bazel --version) == "bazel no_version" && $command != shutdown ]]; then
  flags=(
    "--override_repository=rules_cc=$here/offline/rules_cc"
    "--override_repository=remote_coverage_tools=$here/offline/remote_coverage_tools"
    "--override_repository=rules_java=/usr/share/bazel/rules/java"
  )
fi
exec bazel "$command" "${flags[@]}" "$@"
