"""Environment variables of the launched processes, with which JAX finds the job."""

import os
from collections.abc import Mapping

from jax_ub._src.errors import UbError, shown

# Address of the coordinator, which all processes of this machine can reach.
HOST = "127.0.0.1"
# Limit for processes and for devices per process, far above what one machine can run.
MOST = 4096
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class LaunchError(UbError, ValueError):
    """Raised when the options of `launch`, or the environment it gets, are invalid."""


def check_counts(command: str, num_processes: int, devices_per_process: int) -> None:
    """Checks that the numbers of processes and devices are not above the limit.

    Raises:
        LaunchError: if a number is larger than `MOST`.
    """
    for option, value in (
        ("--processes", num_processes),
        ("--devices-per-process", devices_per_process),
    ):
        if value > MOST:
            raise LaunchError(
                f"{command}: {option} {shown(value)} is more than one machine can run. "
                f"Give at most {MOST}."
            )


def environment(
    given: Mapping[str, str],
    *,
    process: int,
    num_processes: int,
    devices_per_process: int,
    port: int,
    num_hosts: int = 1,
) -> dict[str, str]:
    """Returns the environment of one process, in which JAX finds the job by itself.

    `jax.distributed.initialize()` then needs no arguments. JAX has no environment
    variables for the process index and the number of processes. It detects clusters by
    their variables, so this function sets those of a Slurm step on one node.

    Args:
        given: the launcher's environment; user settings are kept.
        process: index of the process.
        num_processes: number of processes, all on this machine.
        devices_per_process: number of CPU devices or GPUs of each process.
        port: port of the coordinator, which is process 0.
        num_hosts: number of simulated hosts with equally many processes.

    Raises:
        LaunchError: if `XLA_FLAGS` sets another number of devices.
    """
    if _DEVICE_COUNT_FLAG in given.get("XLA_FLAGS", ""):
        raise LaunchError(
            f"launch: XLA_FLAGS has {_DEVICE_COUNT_FLAG}, which JAX refuses beside the "
            "number of devices that launch sets. Take it out of XLA_FLAGS and pass "
            "--devices-per-process."
        )
    first = process * devices_per_process
    devices = range(first, first + devices_per_process)
    address = f"{HOST}:{port}"
    defaults = {
        # jaxlib deadlocks if more launches are in flight than its pool has threads.
        "NPROC": str(max(os.cpu_count() or 1, 4 * devices_per_process)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    ours = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not reachable from other machines
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices)),
        "SLURM_JOB_ID": given.get("SLURM_JOB_ID", "1"),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(num_processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }
    if num_hosts > 1:
        ours["JAX_UB_HOST_ID"] = f"host{process * num_hosts // num_processes}"
    result = {**defaults, **given, **ours, **_past_proxies(given, HOST)}
    # JAX detects Open MPI before Slurm, and would find an mpirun around the launcher.
    result.pop("OMPI_MCA_orte_hnp_uri", None)
    return result


def _past_proxies(given, host):
    if not any(name.lower().endswith("_proxy") for name in given):
        return {}
    hosts = given.get("no_proxy", given.get("NO_PROXY", "")).split(",")
    return {"no_proxy": ",".join([*filter(None, hosts), host])}
