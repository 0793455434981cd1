"""An interrupt of `initialize_ub` and `destroy_ub` leaves nothing behind."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("seed", "longest"),
    [
        (0, 800),
        *(pytest.param(seed, 100, marks=pytest.mark.matrix) for seed in range(1, 5)),
    ],
)
def test_a_second_destroy_ub_completes_an_interrupted_one(seed, longest):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "-n", "2", "--linger", "5"),
            *(HERE / "interrupts.py", str(seed), str(longest)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_UB_TIMEOUT_S": "120",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 2
