"""Identifies the host of a process, and divides its cores among its processes."""

import os
import pathlib
import platform

from jax_ub._src.errors import ConfigurationError
from jax_ub._src.runtime import settings

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_CONTROL_GROUPS = pathlib.Path("/proc/self/cgroup")


def identity() -> str:
    """Returns an identifier of this host, equal in processes that can share memory.

    It holds the kernel's boot id and the network namespace, since processes connect by
    abstract Unix sockets. `JAX_UB_HOST_ID` replaces it.
    """
    given = settings.host_id()
    if given is not None:
        return given
    try:
        boot, network = _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        # Without /proc, only the name of the host is known.
        return platform.node()
    return f"{platform.node()} {boot} {network}"


def short_name(host: str) -> str:
    """Returns the host name with which an identifier from `identity` begins."""
    return host.split(" ")[0]


def cores() -> list[int]:
    """Returns the ids of the CPU cores on which this process may run, ascending."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pool_threads() -> int:
    """Returns the minimum size of jaxlib's thread pools: `NPROC`, or one per core.

    jaxlib reads `NPROC` when its backend starts. Without it, the minimum is the number
    of cores on which the process may run. A process with more devices has larger pools,
    with one thread per device.
    """
    try:
        return settings.pool_threads() or len(cores())
    except ConfigurationError:  # jaxlib ignores a malformed value
        return len(cores())


def why_few_pool_threads(num_devices: int) -> str | None:
    """Returns why programs on this many CPU devices may hang; None if they cannot.

    Each launch occupies a thread per device until its ranks have met. With 2 threads
    per device, the 32 launches that XLA allows in flight do not hang.
    """
    threads = max(pool_threads(), num_devices)
    if num_devices < 2 or threads >= 2 * num_devices:
        return None
    return (
        f"jaxlib has {threads} threads for {num_devices} CPU devices of this process, "
        "and hangs with more than 32 programs in flight. Set "
        f"NPROC={settings.pool_threads_for(num_devices)} before jax starts."
    )


def control_groups() -> str:
    """Returns the text that names this process's cgroups, which limit its CPU time."""
    try:
        return os.fsdecode(_CONTROL_GROUPS.read_bytes())  # may not be UTF-8
    except OSError:
        return ""


def thread_share(own: list[int], everyone: list[list[int]]) -> int:
    """Returns how many threads this process may use if processes share a host's cores.

    Returns:
        The number of threads, at least one. A core that k processes may run on counts
        as 1/k of a thread.
    """
    share = sum(1 / sum(core in cores for cores in everyone) for core in own)
    return max(1, int(share + 1e-9))


def process_cpu_set(own: list[int], everyone: list[list[int]], index: int) -> list[int]:
    """Divides a host's cores among its processes; returns those of this process.

    Args:
        own: the cores that this process may run on.
        everyone: the cores of every process on the host, including this one.
        index: index of this process in `everyone`.

    Returns:
        `own` if the processes may run on different cores. Otherwise an equal,
        contiguous share of `own`; if there are fewer cores than processes, one core,
        which several processes then use.
    """
    if any(cores != own for cores in everyone):
        return own
    count = len(everyone)
    if count > len(own):
        return [own[index % len(own)]]
    return own[index * len(own) // count : (index + 1) * len(own) // count]
