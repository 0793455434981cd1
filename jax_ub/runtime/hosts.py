"""Which processes share a host, and how many cores each of them has to itself."""

import os
import pathlib
import platform

from jax_ub.runtime import settings

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def identity() -> str:
    """What processes have in common that can share memory over abstract sockets.

    The boot of the kernel and the network namespace; or `JAX_UB_HOST_ID`.
    """
    given = settings.host_id()
    if given is not None:
        return given
    try:
        boot, network = _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        # Without /proc nothing says more than the name.
        return platform.node()
    return f"{platform.node()} {boot} {network}"


def short_name(host: str) -> str:
    """A host's name for texts."""
    return host.split(" ")[0]


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def thread_share(own: list[int], everyone: list[list[int]]) -> int:
    """How many threads a process should compute with.

    Args:
        own: the cores that this process may run on.
        everyone: those of every process on the host, this one's too.

    Returns:
        At least one. A core that k processes may run on counts 1/k.
    """
    share = sum(1 / sum(core in cores for cores in everyone) for core in own)
    return max(1, int(share + 1e-9))


def process_cpu_set(own: list[int], everyone: list[list[int]], index: int) -> list[int]:
    """Which cores a process should compute on, so that no two of them choose the same.

    Args:
        own: the cores that this process may run on.
        everyone: those of every process on the host, this one's too.
        index: which of them is this one's.

    Returns:
        All of its own where processes have different ones already; else its part of
        them: a run of cores, or one that it has in common with others where they are
        fewer than the processes.
    """
    if any(cores != own for cores in everyone):
        return own
    count = len(everyone)
    if count > len(own):
        return [own[index % len(own)]]
    return own[index * len(own) // count : (index + 1) * len(own) // count]
