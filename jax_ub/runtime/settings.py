"""The environment variables of jax_ub; nothing else reads the environment."""

import os

from jax_ub.errors import ConfigurationError, shown

# The engine's clocks count nanoseconds in 64 bits: a longer wait would be over at once.
_LONGEST_TIMEOUT_S = 1e9
# Processes that run well may wait for a core for less than this.
_SHORTEST_TIMEOUT_S = 0.1
_MOST_THREADS = 1 << 20
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_FIRST_CALL_TIMEOUT_S = 600.0
_WORDS = (
    *("ALLOW_TF32", "BOOTSTRAP_DIR", "FIRST_CALL_TIMEOUT_S", "HOST_ID", "ISA"),
    *("METHOD", "NUM_THREADS", "NVLS", "TIMEOUT_S", "TUNED"),
)
NAMES = tuple(f"JAX_UB_{word}" for word in _WORDS)


def method() -> str | None:
    """`JAX_UB_METHOD`: the method of every call that names none."""
    return os.environ.get("JAX_UB_METHOD") or None


def timeout_s() -> float | None:
    """`JAX_UB_TIMEOUT_S`: how long a rank waits for its peers; default 120."""
    return _timeout_s("JAX_UB_TIMEOUT_S")


def first_call_timeout_s() -> float | None:
    """`JAX_UB_FIRST_CALL_TIMEOUT_S`: the same at a call site's first call; default 600.

    Processes do not compile equally fast. `JAX_UB_TIMEOUT_S` counts where it is longer.
    """
    return _timeout_s("JAX_UB_FIRST_CALL_TIMEOUT_S")


def deadline_s() -> float:
    """The same with its default, for what waits before the engine runs."""
    return timeout_s() or DEFAULT_TIMEOUT_S


def num_threads() -> int | None:
    """`JAX_UB_NUM_THREADS`: how many threads compute; None: as many as may run."""
    return _threads("JAX_UB_NUM_THREADS")


def isa() -> str | None:
    """`JAX_UB_ISA`: the instruction set of the CPU kernels; default the best here."""
    return os.environ.get("JAX_UB_ISA") or None


def allow_tf32() -> bool:
    """`JAX_UB_ALLOW_TF32`: whether a GPU may round f32 factors to TF32; default not."""
    return _switch("JAX_UB_ALLOW_TF32")


def nvls() -> bool:
    """`JAX_UB_NVLS`: whether NVLink switches may add up all-reduces; default not."""
    return _switch("JAX_UB_NVLS")


def check() -> None:
    """Reads all that only some values are right for.

    Raises:
        ConfigurationError: if one is not.
    """
    for read in (timeout_s, first_call_timeout_s, num_threads, allow_tf32, nvls):
        read()


def xla_memory_share() -> float:
    """What XLA takes of each GPU's memory before any program runs: 0.75 of it.

    `XLA_CLIENT_MEM_FRACTION` or its older name `XLA_PYTHON_CLIENT_MEM_FRACTION`, and
    nothing with `XLA_PYTHON_CLIENT_PREALLOCATE=false` or the allocator "platform".
    """
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if preallocates in ("0", "false") or allocator == "platform":
        return 0.0
    older = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    text = os.environ.get("XLA_CLIENT_MEM_FRACTION") or older
    try:
        return min(float(text or 0.75), 1.0)
    except ValueError:
        return 0.75  # XLA itself refuses it


def runs_concurrently() -> bool:
    """Whether `XLA_FLAGS` asks for captured calls in an order of XLA's own."""
    return "SCHEDULING_MODE=CONCURRENT" in os.environ.get("XLA_FLAGS", "").upper()


def tuned() -> str | None:
    """`JAX_UB_TUNED`: a file of `python -m jax_ub tune`, whose choices "auto" takes."""
    return os.environ.get("JAX_UB_TUNED") or None


def host_id() -> str | None:
    """`JAX_UB_HOST_ID`: processes with different ones share no memory; for tests."""
    return os.environ.get("JAX_UB_HOST_ID") or None


def bootstrap_dir() -> str | None:
    """`JAX_UB_BOOTSTRAP_DIR`: where `bootstrap_backend="file"` leaves its notes."""
    return os.environ.get("JAX_UB_BOOTSTRAP_DIR") or None


def pool_threads() -> int | None:
    """`NPROC`: how many threads jaxlib's pools have, read when its backend starts."""
    return _threads("NPROC")


def set_pool_threads(num_threads: int) -> None:
    """Sets `NPROC` where the user has not; without effect once the backend started."""
    os.environ.setdefault("NPROC", str(num_threads))


def dump_compiled_programs(folder: str) -> None:
    """Asks XLA to write what it compiles; without effect once the backend started."""
    flags = xla_flags()
    asked = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{flags} {asked}".strip()


def version_of_file(path: str) -> tuple[int, ...] | None:
    """Returns what differs where a file was rewritten or replaced; None without one."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# How a program adds flags to those that are set.
ADDING_XLA_FLAGS = (
    'os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_..."'
)


def xla_flags() -> str:
    """Returns the flags that XLA reads when a backend starts."""
    return os.environ.get("XLA_FLAGS", "")


def ask_openmp_to_sleep() -> None:
    """Keeps the threads of libraries that use OpenMP from spinning between calls."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def given() -> dict[str, str]:
    """What is set of `NAMES`, and what looks like one of them, as it is."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("JAX_UB_")}


def _switch(name):
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigurationError(
            f"{name} = {shown(text)} is neither 0 nor 1. Set one of these, or unset it."
        )
    return text == "1"


def _timeout_s(name):
    given_s = _positive(name, float, "seconds")
    if given_s is not None and given_s < _SHORTEST_TIMEOUT_S:
        raise ConfigurationError(
            f"{name} = {shown(os.environ[name])} is too short for processes that run "
            f"well. Set at least {_SHORTEST_TIMEOUT_S} seconds, or unset it."
        )
    return given_s and min(given_s, _LONGEST_TIMEOUT_S)


def _threads(name):
    number = _positive(name, int, "threads")
    if number is not None and number > _MOST_THREADS:
        raise ConfigurationError(
            f"{name} = {shown(number)} is more threads than a machine can run. Set at "
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
