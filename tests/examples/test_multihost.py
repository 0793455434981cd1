import os
import pathlib
import random
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def launch(*arguments):
    return subprocess.run(
        [
            *(sys.executable, "-m", "jax_ub", "launch", "--timeout", "600"),
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
def test_learns_on_separate_hosts_and_on_one(job, layout):
    done = launch(*job, *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"[0] {layout}" in done.stdout
    losses = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


def free_job_id():
    """Returns a job id from which JAX derives a free coordinator port."""
    for job in random.sample(range(4096), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", 61440 + job))
            except OSError:
                continue
            return job
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_tasks_of_a_slurm_step_find_each_other():
    # Variables that srun sets for the tasks of one node, without a coordinator address.
    step = {
        "SLURM_JOB_ID": str(free_job_id()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "no_proxy": "localhost",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COORD")}
    tasks = [
        subprocess.Popen(
            ["timeout", "600", sys.executable, *map(str, SMALL)],
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **step, "SLURM_PROCID": task, "SLURM_LOCALID": task},
        )
        for task in "01"
    ]
    first, second = (task.communicate()[0] for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0]
    assert "1 hosts with [4] devices: dp=1, tp=4" in first
    assert "not overlapped" not in first
    losses = [float(text) for text in re.findall(r"loss (\S+)", first)]
    assert losses == sorted(losses, reverse=True)
    assert "loss" not in second


@pytest.mark.slow
def test_devices_that_cannot_be_grouped_are_rejected():
    done = launch("-n", 1, "--devices-per-process", 3, *SMALL, "--tp", 2)
    assert done.returncode == 1
    assert "--tp 2 does not divide the hosts' devices: [3]" in done.stderr
