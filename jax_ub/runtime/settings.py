"""The environment variables of jax_ub; nothing else reads the environment."""

import os


def method() -> str | None:
    """`JAX_UB_METHOD`: the method of every call that names none."""
    return os.environ.get("JAX_UB_METHOD") or None


def timeout_s() -> float | None:
    """`JAX_UB_TIMEOUT_S`: how long a rank waits for its peers; default 120."""
    return _positive("JAX_UB_TIMEOUT_S", float, "seconds")


def num_threads() -> int | None:
    """`JAX_UB_NUM_THREADS`: how many threads compute; default the machine's cores."""
    return _positive("JAX_UB_NUM_THREADS", int, "threads")


def isa() -> str | None:
    """`JAX_UB_ISA`: the instruction set of the CPU kernels; default the best here."""
    return os.environ.get("JAX_UB_ISA") or None


def _positive(name, kind, unit):
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ValueError(f"{name} = {text!r} is not a positive number of {unit}.")
    return value
