"""Runs the tests of one process in several processes, on meshes of all."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from layouts import LAYOUTS

TESTS = pathlib.Path(__file__).parents[1]
FUSED = [
    f"ops/fused/test_{name}.py"
    for name in (
        "backward_linear_add",
        "forward_linears",
        "functional",
        "userbuffers_linear",
    )
]
SAME = [
    "primitives",
    "fp8/test_ranks.py",
    *FUSED,
    *(
        f"rules/test_{name}.py"
        for name in (
            "all_gather_matmul",
            "fp8_linear",
            "linear",
            "many_calls",
            "random_models",
            "random_programs",
            "scaled_kernels",
            "scaled_linear",
            "scaled_transformations",
            "summed_matmuls",
            "wire",
        )
    ),
]


def first_failure(done):
    """Returns the output of the first failed process, and the launcher's report."""
    failed = re.search(r"launch: process (\d+)", done.stderr)
    marks = ("launch:", f"[{failed[1]}] " if failed else "[")
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line for line in lines if line.startswith(marks))


def run_tests(num_processes, layout, part, paths=SAME):
    """Runs a part of the tests in several processes; the first failure ends them."""
    pytest_alone = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    pytest_alone += ["-m", "not matrix"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "-n", str(num_processes)),
            *("--devices-per-process", "8", "--timeout", "1500"),
            *(*pytest_alone, *(str(TESTS / path) for path in paths)),
        ],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]),
            "UB_TEST_LAYOUT": layout,
            "UB_TEST_PART": part,
            "JAX_UB_TIMEOUT_S": "300",
        },
    )
    assert done.returncode == 0, first_failure(done)
    for process in range(num_processes):
        (summary,) = (
            line
            for line in done.stdout.splitlines()
            if line.startswith(f"[{process}]") and " passed" in line
        )
        assert "failed" not in summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "layout", "part"),
    [(2, "blocks", "0/10"), (3, "dealt", "1/16"), (4, "reversed", "2/20")],
)
def test_some_tests_pass_in_several_processes(num_processes, layout, part):
    run_tests(num_processes, layout, part)


@pytest.mark.slow
def test_fused_operations_pass_in_several_processes():
    run_tests(2, "dealt", "1/4", FUSED)


# Each number of processes runs all tests, a third of them in each layout.
@pytest.mark.matrix
@pytest.mark.parametrize("index", range(len(LAYOUTS)))
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_all_tests_pass_in_several_processes(num_processes, index):
    run_tests(num_processes, [*LAYOUTS][index], f"{index}/{len(LAYOUTS)}")
