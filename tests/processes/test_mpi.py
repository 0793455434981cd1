"""A program under a real mpirun: `bootstrap_backend="mpi"`."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py (apt install openmpi-bin, pip install mpi4py)",
)


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_processes_find_each_other_by_mpi(processes, devices):
    done = subprocess.run(
        ["mpirun", "-n", str(processes), sys.executable, HERE / "mpi.py", str(devices)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_UB_TIMEOUT_S": "120",
            # Open MPI needs these as root, and with fewer cores than ranks.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == processes
