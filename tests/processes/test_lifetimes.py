"""Communicators and processes that end leave no resources behind."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow


def launch(num_processes, devices, *program):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "-n", str(num_processes)),
            *("--devices-per-process", str(devices), "--timeout", "600"),
            *map(str, program),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_UB_TIMEOUT_S": "300",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_hundred_communicators_leave_nothing_behind():
    out = launch(2, 2, HERE / "cycles.py", 200)
    ends = [json.loads(line[4:]) for line in out.splitlines() if line[4:5] == "{"]
    assert len(ends) == 2
    for end in ends:
        *before, before_mb = end["before"]
        *after, after_mb = end["after"]
        assert after == before
        # 150 communicators of 1.5 MB would be 200 MB; compiling a program takes some.
        assert after_mb - before_mb < 50


def test_random_sequences():
    out = launch(3, 3, HERE / "soak.py", "--seed", 0, "--sequences", 4)
    assert len(re.findall(r"seed \d+ passed", out)) == 4


def test_programs_in_flight_end_before_their_process_closes_its_groups():
    out = launch(2, 2, HERE / "in_flight.py")
    assert out.count("done") == 2
