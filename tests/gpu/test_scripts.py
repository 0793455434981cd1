"""The scripts of the GPU check, run on a CPU."""

import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command, timeout_s=600):
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
    )


def test_modules_that_the_check_imports_exist():
    text = (HERE / "gpu_check.sh").read_text()
    imports = re.findall(r"from (jax_ub[\w.]*) import (\w+)", text)
    assert imports
    for package, name in imports:
        assert pkgutil.resolve_name(f"{package}.{name}") is not None


@pytest.mark.parametrize("operands", [(), ("--fp8",)])
def test_local_ops_are_exact(operands):
    done = run(sys.executable, HERE / "local.py", "--short", *operands)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right on cpu" in done.stdout


def test_every_op_and_method_is_exact_over_processes():
    launch = (sys.executable, "-m", "jax_ub", "launch", "-n", "2", "--timeout", "550")
    options = ("--rounds", "1", "--calls", "2", "--dtypes", "1")
    done = run(*launch, HERE / "ranks.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right: 2 ranks on cpu" in done.stdout
    assert done.stdout.count("right: ") == 4 * 5 + 1 + 1
    done = run(*launch, HERE / "ranks.py", "--fp8", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("scaled", "scaled_rows", "scaled_blocks"):
        assert done.stdout.count(f"right: {name} ") == 5


@pytest.fixture
def figures(tmp_path):
    claims = [
        {"claim": "chunked", "value": 1.02, "limit": 1.05, "holds": True},
        {"claim": "sum", "value": 0.5, "limit": 0.85, "holds": False},
    ]
    (tmp_path / "gpu_bench.json").write_text(json.dumps({"verdicts": claims}))
    (tmp_path / "gpu_check.log").write_text(
        "host time of dgrad_add in a program of 64: 3.20 us\n"
        "host time of matmul_all_reduce over one rank in a program of 64: 12.50 us\n"
        "ok              12 s  against XLA\n"
        "ok              30 s  2 processes on one GPU, captured\n"
        "FAILED (1)      30 s  4 processes on one GPU\n"
        "not run          0 s  NVLS\n"
        "no time          0 s  memcheck\n"
    )
    results = [
        {
            "op": op,
            "variant": variant,
            "speedups": {"xla_best": {"median": 0.99}},
            "shares": {"plain_gemm": {"median": 0.97}} if "add" in variant else {},
        }
        for op, variant in [("gemm", "nn"), ("dgrad_add", "nt+add")]
    ]
    found = {"results": results, "fallbacks": []}
    (tmp_path / "bench.json").write_text(json.dumps(found))
    results[1]["speedups"]["xla_best"]["median"] = 1.01
    (tmp_path / "tuned.json").write_text(json.dumps(found))
    return tmp_path


def test_every_claim_has_a_result(figures):
    done = run(sys.executable, HERE / "verdicts.py", figures)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (figures / "verdicts.txt").read_text()
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "holds   right results: 2 processes on one GPU, captured",
        "MISSED  right results: 4 processes on one GPU",
        "open    right results: NVLS",
        "open    right results: memcheck",
    ]
    assert "holds   chunked: 1.020 (goal 1.05)" in lines
    assert "MISSED  sum: 0.500 (goal 0.85)" in lines
    assert "holds   a plain product over XLA's, 8192 cubed: 0.990 (goal 0.97)" in lines
    assert "MISSED  dgrad_add over XLA's best: 0.990 (goal 1.0)" in lines
    assert "holds   dgrad_add over XLA's best, tuned: 1.010 (goal 1.0)" in lines
    assert "holds   dgrad_add, share of the plain product: 0.970 (goal 0.95)" in lines
    assert any(line.startswith("open    wgrad_accumulate") for line in lines)
    assert "holds   host time of dgrad_add: 3.20 us (goal 10.0)" in lines
    slow = "host time of matmul_all_reduce over one rank: 12.50 us (goal 10.0)"
    assert f"MISSED  {slow}" in lines


def test_xla_in_place_of_the_engine_leaves_claims_open(figures):
    for name in ("bench", "tuned"):
        found = json.loads((figures / f"{name}.json").read_text())
        found["fallbacks"] = [{"label": "bench nn", "reason": "no driver"}]
        (figures / f"{name}.json").write_text(json.dumps(found))
    lines = run(sys.executable, HERE / "verdicts.py", figures).stdout.splitlines()
    assert "open    against XLA: plain jax.lax: no driver" in lines
    assert not any("XLA's" in line for line in lines)


def test_claims_without_figures_are_open(tmp_path):
    lines = run(sys.executable, HERE / "verdicts.py", tmp_path).stdout.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("open ") for line in lines)


def test_a_check_without_time_lists_omitted_steps(tmp_path):
    env = ("env", f"OUT={tmp_path}", "GPU_CHECK_S=0", f"PYTHON={sys.executable}")
    done = run(*env, "bash", HERE / "gpu_check.sh")
    assert done.returncode == 1
    log = (tmp_path / "gpu_check.log").read_text()
    assert log == done.stdout
    script = (HERE / "gpu_check.sh").read_text()
    steps = re.findall(r'^  step \d+ "(.+?)"', script, re.M)
    assert steps[0] == "machine"
    for name in steps:  # at its position in the output, and in the summary
        assert len(re.findall(f"^no time .* {re.escape(name)}$", log, re.M)) == 2


@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("========= Error: Device not supported", "not run"),
        ("========= Invalid __global__ write", "FAILED (1)"),
    ],
)
def test_a_gpu_that_no_tool_can_inspect_leaves_claims_open(
    tmp_path, check, said, status
):
    python = (
        f'case "$*" in *sysconfig*) echo {tmp_path};; *) {sys.executable} "$@"; esac'
    )
    stubs = {
        "python": python,
        "cmake": "exit 1",
        "compute-sanitizer": f"[[ $* == '--tool {check} '* ]] && echo '{said}'; exit 1",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    # Prebuilt binaries would replace those of the tree, which the tests have loaded.
    none = f"PREBUILT={tmp_path}/prebuilt"
    env = ("env", f"OUT={tmp_path}", f"PYTHON={tmp_path}/python", none)
    only = f"GPU_CHECK_ONLY={check}"
    log = run(*env, only, "bash", HERE / "gpu_check.sh").stdout
    assert re.search(f"^{re.escape(status)} +\\d+ s  {check}$", log, re.M), log


def test_a_check_of_some_steps_runs_no_others(tmp_path):
    only = "GPU_CHECK_ONLY=memcheck|8 processes"
    env = ("env", f"OUT={tmp_path}", "GPU_CHECK_S=0", only, f"PYTHON={sys.executable}")
    log = run(*env, "bash", HERE / "gpu_check.sh").stdout
    # The selected steps had no time; each is reported twice.
    wanted = ("machine", "build from source", "memcheck")
    wanted += ("8 processes on one GPU, captured", "verdicts")
    assert set(re.findall(r"^no time +\d+ s  (.+)$", log, re.M)) == set(wanted)
    steps = re.findall(r'^  step \d+ "', (HERE / "gpu_check.sh").read_text(), re.M)
    omitted = len(steps) - len(wanted)
    assert len(re.findall(r"^not run +\d+ s  ", log, re.M)) == 2 * omitted
