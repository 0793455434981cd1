"""How tests run a Sequential on ranks, fused and unfused."""

import contextlib

import jax
from jax.sharding import PartitionSpec as P
from programs import tp_mesh

from jax_ub import ops
from jax_ub.ops import registry

ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")


def names(found) -> list[str]:
    """The types of a list of operations."""
    return [type(op).__name__ for op in found]


@contextlib.contextmanager
def without_fusions():
    """What is traced here runs every basic operation by itself."""
    registered = {name: registry.fusions(name) for name in registry.PASSES}
    for fusion in {f for found in registered.values() for f in found}:
        registry.unregister_fusion(fusion)
    register = {
        "joint": registry.register_joint_fusion,
        "forward": registry.register_forward_fusion,
        "backward": registry.register_backward_fusion,
    }
    try:
        yield
    finally:
        for name, found in registered.items():
            for fusion in found:
                register[name](fusion)


def sharded(function, num_ranks: int, in_specs, out_specs, *, check_vma=True):
    """`function` on every rank, not compiled yet."""
    return jax.shard_map(
        function,
        mesh=tp_mesh(num_ranks),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


def overlapped(name: str | None, **options) -> dict:
    """Options of a sequence-parallel linear, overlapped where it has a name."""
    userbuffers = None if name is None else {"comm_name": name}
    return {"sequence_parallel": True, "userbuffers_options": userbuffers, **options}


def linear(mode, k: int, n: int, name: str | None = None, *, bias=True, **options):
    """An `ops.Linear` of global sizes."""
    return ops.Linear(
        k,
        n,
        use_bias=bias,
        tensor_parallel_mode=mode,
        **overlapped(name, **options),
    )
