"""train_lm.py in several processes: the losses of one process."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples/train_lm.py")
STEPS = 8
FLAGS = [
    *("--d-model", "32", "--d-ff", "64", "--layers", "1", "--heads", "4"),
    *("--seq-len", "32", "--dtype", "f32", "--steps", str(STEPS), "--no-compare"),
]

pytestmark = pytest.mark.slow


def in_two_processes(flags):
    """Runs the script with half of its ranks in each process; returns its output."""
    devices = str(int(flags[flags.index("--tp") + 1]) // 2)
    own = {"NPROC", "JAX_NUM_CPU_DEVICES"}  # the launcher sets these
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "--timeout", "550", "-n", "2"),
            *("--devices-per-process", devices, SCRIPT, "--distributed", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **{k: v for k, v in os.environ.items() if k not in own},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run, plot, method, tp):
    flags = ["--tp", str(tp), "--method", method, "--plot", str(plot)]
    assert "not overlapped" not in run([*FLAGS, *flags])
    found = json.loads(plot.with_suffix(".json").read_text())["runs"][0]["losses"]
    assert len(found) == STEPS
    return np.array(found)


@pytest.mark.parametrize(
    "method", ["ring_exchange", pytest.param("xla", marks=pytest.mark.matrix)]
)
def test_losses_are_bitwise_equal_if_the_schedule_is_the_same(
    method, tmp_path, run_train_lm
):
    # With two ranks, XLA sums gradients of replicated parameters in only one order.
    one = losses(run_train_lm, tmp_path / "one.png", method, 2)
    two = losses(in_two_processes, tmp_path / "two.png", method, 2)
    np.testing.assert_array_equal(two, one)


@pytest.mark.matrix
def test_losses_are_close_if_processes_sum_their_ranks_first(tmp_path, run_train_lm):
    one = losses(run_train_lm, tmp_path / "one.png", "direct", 4)
    two = losses(in_two_processes, tmp_path / "two.png", "direct", 4)
    # Sums in a different order differ by a few roundings, which Adam magnifies.
    rounding = np.finfo(np.float32).eps * np.sqrt(32)
    np.testing.assert_allclose(two, one, rtol=2**STEPS * rounding)
