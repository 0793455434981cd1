"""What a call of an exported program is told besides, to know which rank runs it.

A device finds its rank by its id. An exported program may run on other devices than it
was lowered for, or on the same in another order: there XLA's number of the partition
says which of them a device stands for. A CPU takes its rank from it; a GPU, whose host
cannot read it, only checks it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_ub.primitives.mesh import Ranks


def devices(ctx: Any, ranks: Ranks) -> dict[str, np.ndarray]:
    """The attribute of a call whose ranks are found by the number of the partition.

    They are in a program that is exported, and on an abstract mesh. It holds the ids of
    all devices of the mesh, by number of the partition.
    """
    for_export = ctx.module_context.lowering_parameters.for_export
    if not ranks.ids or not (for_export or ranks.are_partitions):
        return {}
    return {"devices": np.array(ranks.ids, np.int64)}


def with_partition(ctx: Any, operands: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The operands, and the number of the partition as the last."""
    partition = jax.core.ShapedArray((), np.dtype(np.uint32))
    ctx = ctx.replace(avals_in=[*ctx.avals_in, partition])
    return ctx, (*operands, hlo.partition_id())
