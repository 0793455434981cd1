import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def launch(*arguments):
    return subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "--timeout", "200"),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


SMALL = (ROOT / "examples/multihost.py", "--d-model", 32, "--seq-len", 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "layout"),
    [
        (("-n", 4, "--hosts", 2), "2 hosts with [2, 2] devices: dp=2, tp=2"),
        pytest.param(
            ("-n", 2, "--devices-per-process", 2),
            "1 hosts with [4] devices: dp=1, tp=4",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_learns_with_hosts_apart_and_together(job, layout):
    done = launch(*job, *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"[0] {layout}" in done.stdout
    losses = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


def test_devices_that_cannot_be_grouped_are_refused():
    done = launch("-n", 1, "--devices-per-process", 3, *SMALL, "--tp", 2)
    assert done.returncode == 1
    assert "--tp 2 does not divide the hosts' devices: [3]" in done.stderr
