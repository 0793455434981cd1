"""What a launched process finds in its environment."""

import os
from collections.abc import Mapping

from jax_ub.errors import UbError, shown

# Where the processes of a machine meet.
HOST = "127.0.0.1"
# Of processes, and of devices of each: far more than work on one machine.
MOST = 4096
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class LaunchError(UbError, ValueError):
    """The command line of `launch` cannot run."""


def check_counts(command: str, num_processes: int, devices_per_process: int) -> None:
    """Rejects more processes or devices than one machine can run.

    Raises:
        LaunchError: says the limits.
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
    """The environment in which `jax.distributed.initialize()` needs no arguments.

    JAX asks the cluster it runs on who it is. It has no variables of its own for that,
    so that these are the ones of a Slurm step on one node.

    Args:
        given: the environment of the launcher; what it sets on purpose is kept.
        process: which process this is, from 0.
        num_processes: how many there are, all on this machine.
        devices_per_process: CPU devices of each, or GPUs.
        port: of the coordinator, which is process 0.
        num_hosts: how many hosts the processes play, in equal parts.

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
        # jaxlib deadlocks with more launches in flight than its pool has threads.
        "NPROC": str(max(os.cpu_count() or 1, 4 * devices_per_process)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    ours = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # nobody else's business
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
    # JAX looks for Open MPI first: an mpirun that started the launcher is not ours.
    result.pop("OMPI_MCA_orte_hnp_uri", None)
    return result


def _past_proxies(given, host):
    if not any(name.lower().endswith("_proxy") for name in given):
        return {}
    hosts = given.get("no_proxy", given.get("NO_PROXY", "")).split(",")
    return {"no_proxy": ",".join([*filter(None, hosts), host])}
