"""Traces calls without running them, to check their errors."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import tp_mesh

WHOLE = P()


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def trace(function, *operands, mesh=None, specs=WHOLE):
    """Traces `function` on four ranks with replicated operands."""
    mapped = jax.shard_map(
        function,
        mesh=mesh or tp_mesh(4),
        in_specs=specs,
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped).trace(*operands)


def refuses(error, message, function, *operands, **where):
    with pytest.raises(error, match=message):
        trace(function, *operands, **where)
