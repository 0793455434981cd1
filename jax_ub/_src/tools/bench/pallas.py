"""JAX's own collective matmul in Pallas, with which AG+GEMM is compared on GPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_ub._src.methods import PallasTiles
from jax_ub._src.primitives import pallas
from jax_ub._src.tools.bench.cases import PALLAS
from jax_ub._src.tools.devices import AXIS, Ranks
from jax_ub._src.tools.options import Shape
from jax_ub._src.tools.timing import Candidate, fastest


def programs(
    shape: Shape, dtype: str, ranks: Ranks
) -> dict[PallasTiles, Callable[..., jax.Array]] | str:
    """Returns {tile sizes: AG+GEMM with JAX's Pallas kernel} for all tiles that fit.

    If the kernel cannot run on these devices or at this size, returns the reason.
    """
    sizes = shape.M, shape.K, shape.N
    reason = pallas.why_not(ranks.devices, dtype, *sizes)
    if reason is not None:
        return reason
    return {
        tiles: functools.partial(pallas.all_gather_matmul, axis_name=AXIS, tiles=tiles)
        for tiles in pallas.tiles_for(*sizes, ranks.num_ranks)
    }


def find_fastest(
    candidate: Callable[..., Candidate], shape: Shape, dtype: str, ranks: Ranks
) -> tuple[Candidate, PallasTiles] | str:
    """Returns JAX's fastest program of AG+GEMM and its tiles, or why there is none."""
    found: Any = programs(shape, dtype, ranks)
    if isinstance(found, str):
        return found
    tiles = {str(tiles): tiles for tiles in found}
    try:
        best = fastest(
            [candidate(PALLAS, run, str(each)) for each, run in found.items()]
        )
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return f"it failed: {str(error).splitlines()[0]}"
    return best, tiles[best.variant]
