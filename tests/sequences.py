"""Sequences of operations that tests fuse, and their layouts."""

from jax.sharding import PartitionSpec as P

from jax_ub import ops

ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")


def names(found) -> list[str]:
    """Returns the types of a list of operations."""
    return [type(op).__name__ for op in found]


def overlapped(name: str | None, **options) -> dict:
    """Returns options of a sequence-parallel linear, overlapped if it has a name."""
    userbuffers = None if name is None else {"comm_name": name}
    return {"sequence_parallel": True, "userbuffers_options": userbuffers, **options}


def linear(mode, k: int, n: int, name: str | None = None, *, bias=True, **options):
    """Returns an `ops.Linear` of global sizes."""
    return ops.Linear(
        k,
        n,
        use_bias=bias,
        tensor_parallel_mode=mode,
        **overlapped(name, **options),
    )
