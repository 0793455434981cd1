"""Lets a call of an exported program find its rank by XLA's partition id.

Normally a device finds its rank by its device id. An exported program may run on other
devices than it was lowered for, or on the same devices in another order. There XLA's
partition id tells which device of the lowering the running device replaces. The CPU
engine reads its rank from the partition id. On GPUs, where the host cannot read the
value, it is only compared with the expected partition id.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_ub._src.primitives.mesh import Ranks


def devices(ctx: Any, ranks: Ranks) -> dict[str, np.ndarray]:
    """Returns the FFI attribute that maps XLA partition ids to device ids.

    It holds the ids of all devices of the mesh, indexed by partition id. It is present
    in exported programs and on abstract meshes; for other calls the result is empty.
    """
    for_export = ctx.module_context.lowering_parameters.for_export
    if not ranks.ids or not (for_export or ranks.are_partitions):
        return {}
    return {"devices": np.array(ranks.ids, np.int64)}


def with_partition(ctx: Any, operands: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Appends XLA's partition id to the operands of a custom call and their avals."""
    partition = jax.core.ShapedArray((), np.dtype(np.uint32))
    ctx = ctx.replace(avals_in=[*ctx.avals_in, partition])
    return ctx, (*operands, hlo.partition_id())
