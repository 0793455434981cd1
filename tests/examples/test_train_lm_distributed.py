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
LAUNCH = ["-m", "jax_ub", "launch", "--timeout", "550"]

pytestmark = pytest.mark.slow


def losses(tmp_path, method, tp, *launch):
    plot = tmp_path / f"{method}-{len(launch)}.png"
    flags = [*FLAGS, "--tp", str(tp), "--method", method, "--plot", str(plot)]
    script = [SCRIPT, *flags, *(["--distributed"] if launch else [])]
    own = {"NPROC", "JAX_NUM_CPU_DEVICES"}  # the script must not inherit these
    done = subprocess.run(
        [sys.executable, *launch, *script],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **{k: v for k, v in os.environ.items() if k not in own},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
    )
    assert done.returncode == 0, done.stderr
    assert "not overlapped" not in done.stdout
    found = json.loads(plot.with_suffix(".json").read_text())["runs"][0]["losses"]
    assert len(found) == STEPS
    return np.array(found)


@pytest.mark.parametrize(
    "method", ["ring_exchange", pytest.param("xla", marks=pytest.mark.matrix)]
)
def test_losses_are_bitwise_equal_if_the_schedule_is_the_same(method, tmp_path):
    # With two ranks, XLA sums gradients of replicated parameters in only one order.
    one = losses(tmp_path, method, 2)
    two = losses(tmp_path, method, 2, *LAUNCH, "-n", "2")
    np.testing.assert_array_equal(two, one)


@pytest.mark.matrix
def test_losses_are_close_if_processes_sum_their_ranks_first(tmp_path):
    one = losses(tmp_path, "direct", 4)
    two = losses(
        tmp_path, "direct", 4, *LAUNCH, "-n", "2", "--devices-per-process", "2"
    )
    # Sums in a different order differ by a few roundings, which Adam magnifies.
    rounding = np.finfo(np.float32).eps * np.sqrt(32)
    np.testing.assert_allclose(two, one, rtol=2**STEPS * rounding)
