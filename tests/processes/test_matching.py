"""Calls of two processes are matched, with XLA's run ids and orders."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def launch(devices, *arguments):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "-n", "2"),
            *("--devices-per-process", str(devices), "--timeout", "600"),
            *(HERE / "matching.py", *map(str, arguments)),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_UB_TIMEOUT_S": "120",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all matched") == 2


def test_equal_calls_are_matched():
    launch(2)


def test_a_process_may_load_programs_that_another_compiles(tmp_path):
    # XLA starts counting the launches of a loaded program at a different number. Only
    # process 0 writes the cache, in the first job, in which both processes compile.
    launch(1, 0, tmp_path)
    stored = {path.name for path in tmp_path.iterdir()}
    launch(1, 0, tmp_path)
    assert len(stored) >= 4
    assert {path.name for path in tmp_path.iterdir()} == stored
