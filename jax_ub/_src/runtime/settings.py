"""Reads the environment variables of jax_ub.

No other module reads the environment, except for the launcher, which passes it on.
"""

import math
import os

from jax_ub._src.errors import ConfigurationError, shown

# Longest timeout in seconds. A longer one would overflow the engine's 64-bit count of
# nanoseconds, and expire at once.
_LONGEST_TIMEOUT_S = 1e9
# Shortest timeout in seconds. A process may wait almost this long for a core, so with a
# shorter timeout, running processes would be reported as lost.
_SHORTEST_TIMEOUT_S = 0.1
_MOST_THREADS = 1 << 20
DEFAULT_TIMEOUT_S = 120.0
_WORDS = (
    *("ALLOW_TF32", "FIRST_CALL_TIMEOUT_S", "HOST_ID", "ISA"),
    *("METHOD", "NUM_THREADS", "NVLS", "TIMEOUT_S", "TUNED"),
)
NAMES = tuple(f"JAX_UB_{word}" for word in _WORDS)


def method() -> str | None:
    """Returns `JAX_UB_METHOD`, the default method of calls, or None if it is unset."""
    return os.environ.get("JAX_UB_METHOD") or None


def timeout_s() -> float:
    """Returns `JAX_UB_TIMEOUT_S`: seconds that a rank waits for peers, 120 by default.

    `initialize_ub` waits as long for a process.
    """
    return _timeout_s("JAX_UB_TIMEOUT_S") or DEFAULT_TIMEOUT_S


def first_call_timeout_s() -> float | None:
    """Returns `JAX_UB_FIRST_CALL_TIMEOUT_S`: the timeout of a call site's first run.

    The default is 600 s. It is longer than the timeout of later runs, because some
    processes compile more slowly than others. `JAX_UB_TIMEOUT_S` applies instead if it
    is longer.
    """
    return _timeout_s("JAX_UB_FIRST_CALL_TIMEOUT_S")


def num_threads() -> int | None:
    """Returns `JAX_UB_NUM_THREADS`: how many threads compute at a time, or None.

    None means one thread per core that this process may use, or fewer if the CPU quota
    of its control group is smaller.
    """
    return _threads("JAX_UB_NUM_THREADS")


def isa() -> str | None:
    """Returns `JAX_UB_ISA`: the instruction set of the CPU kernels, or None.

    None means the fastest one that this machine supports.
    """
    return os.environ.get("JAX_UB_ISA") or None


def allow_tf32() -> bool:
    """Returns `JAX_UB_ALLOW_TF32`: whether GPUs may round f32 GEMM operands to TF32.

    The default is False.
    """
    return _switch("JAX_UB_ALLOW_TF32")


def nvls() -> bool:
    """Returns `JAX_UB_NVLS`: whether NVLink switches may compute all-reduces.

    The default is False.
    """
    return _switch("JAX_UB_NVLS")


def check() -> None:
    """Raises an error if a `JAX_UB_` environment variable is invalid."""
    for read in (timeout_s, first_call_timeout_s, num_threads, allow_tf32, nvls):
        read()


def xla_memory_share() -> float:
    """Returns the fraction of a GPU's memory that XLA preallocates, usually 0.75.

    Reads `XLA_CLIENT_MEM_FRACTION`, else its older name
    `XLA_PYTHON_CLIENT_MEM_FRACTION`. The fraction is 0 if
    `XLA_PYTHON_CLIENT_PREALLOCATE` is false or `XLA_PYTHON_CLIENT_ALLOCATOR` is
    "platform".
    """
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if preallocates in ("0", "false") or allocator == "platform":
        return 0.0
    older = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    text = os.environ.get("XLA_CLIENT_MEM_FRACTION") or older
    try:
        share = float(text or 0.75)
    except ValueError:
        share = math.nan
    # For an invalid fraction, XLA's default is returned. XLA reports the error itself.
    return min(share, 1.0) if share > 0 else 0.75


def runs_concurrently() -> bool:
    """Returns whether XLA may reorder the calls of a captured CUDA graph.

    The flag `xla_gpu_command_buffer_scheduling_mode=CONCURRENT` allows it.
    """
    return "SCHEDULING_MODE=CONCURRENT" in xla_flags().upper()


# The flag that makes XLA run its collectives in order with other kernels on GPUs.
COLLECTIVES_IN_ORDER = "--xla_gpu_disable_async_collectives=ALLCOLLECTIVES"


def orders_collectives() -> bool:
    """Returns whether `XLA_FLAGS` makes collectives run in order with other kernels."""
    return COLLECTIVES_IN_ORDER.upper() in xla_flags().upper()


def shares_hardware_queue() -> bool:
    """Returns whether all streams of a GPU share one hardware queue.

    They do if `CUDA_DEVICE_MAX_CONNECTIONS` is 1.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"


def tuned() -> str | None:
    """Returns `JAX_UB_TUNED`, the path of a file with the fastest methods, or None.

    Method "auto" follows this tuned file. `python -m jax_ub tune` writes such files.
    """
    return os.environ.get("JAX_UB_TUNED") or None


def host_id() -> str | None:
    """Returns `JAX_UB_HOST_ID`, an identity for this host, or None if it is unset.

    Processes with different values do not share memory.
    """
    return os.environ.get("JAX_UB_HOST_ID") or None


def has_coordinator() -> bool:
    """Returns whether `JAX_COORDINATOR_ADDRESS` is set, as by `jax_ub launch`.

    `jax.distributed.initialize()` reads it, to join the processes of a job.
    """
    return bool(os.environ.get("JAX_COORDINATOR_ADDRESS"))


def pool_threads() -> int | None:
    """Returns `NPROC`: the size of jaxlib's thread pools, or None.

    jaxlib reads it when its backend starts.
    """
    return _threads("NPROC")


def pool_threads_for(num_devices: int) -> int:
    """Returns a sufficient size of jaxlib's thread pools for this many CPU devices.

    jaxlib deadlocks if more launches are in flight than its pool has threads. It also
    computes on these threads, so there is at least one per core.
    """
    return max(os.cpu_count() or 1, 4 * num_devices)


def set_pool_threads(num_devices: int) -> None:
    """Sets the size of jaxlib's thread pools (`NPROC`), unless the user has set it.

    It has no effect once JAX's backend has started.
    """
    os.environ.setdefault("NPROC", str(pool_threads_for(num_devices)))


def dump_compiled_programs(folder: str) -> None:
    """Makes XLA write compiled programs to a folder, by flags in `XLA_FLAGS`.

    They have no effect once JAX's backend has started.
    """
    flags = xla_flags()
    asked = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{flags} {asked}".strip()


def version_of_file(path: str) -> tuple[int, ...] | None:
    """Returns a value that changes when a file is rewritten or replaced.

    Returns None if the file does not exist. The value is device, inode, size and
    modification time.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# A line of Python that appends a flag to `XLA_FLAGS`. Error messages show it as advice.
ADDING_XLA_FLAGS = (
    'os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_..."'
)


def xla_flags() -> str:
    """Returns the value of `XLA_FLAGS`, which XLA reads when a backend starts."""
    return os.environ.get("XLA_FLAGS", "")


def no_color() -> bool:
    """Returns whether `NO_COLOR` is set, which requests output without colors."""
    return bool(os.environ.get("NO_COLOR"))


def is_dumb_terminal() -> bool:
    """Returns whether the terminal understands no control sequences, by `TERM`."""
    return os.environ.get("TERM") == "dumb"


def ask_openmp_to_sleep() -> None:
    """Makes idle threads of OpenMP libraries sleep instead of spin.

    Sets `OMP_WAIT_POLICY` unless the user has set it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def given() -> dict[str, str]:
    """Returns the environment variables whose names begin with "JAX_UB_".

    Callers compare them with `NAMES` to report misspelt variables.
    """
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("JAX_UB_")}


def _switch(name):
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigurationError(
            f"{name} = {shown(text)} is not 0 or 1. Set one of them, or unset it."
        )
    return text == "1"


def _timeout_s(name):
    given_s = _positive(name, float, "seconds")
    if given_s is not None and given_s < _SHORTEST_TIMEOUT_S:
        raise ConfigurationError(
            f"{name} = {shown(os.environ[name])} is too short for healthy "
            f"processes. Set at least {_SHORTEST_TIMEOUT_S} seconds, or unset it."
        )
    return given_s and min(given_s, _LONGEST_TIMEOUT_S)


def _threads(name):
    number = _positive(name, int, "threads")
    if number is not None and number > _MOST_THREADS:
        raise ConfigurationError(
            f"{name} = {shown(number)} is too large. Set at "
            f"most {_MOST_THREADS}, or unset it."
        )
    return number


def _positive(name, kind, unit):
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ConfigurationError(
            f"{name} = {shown(text)} is not a positive number of {unit}. Set one, or "
            "unset it."
        )
    return value
