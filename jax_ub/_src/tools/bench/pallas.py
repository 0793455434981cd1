"""JAX's own collective matmul in Pallas, with which AG+GEMM is compared on GPUs.

The kernel of `jax.experimental.pallas.ops.gpu.collective_matmul_mgpu` is imported only
where it can run. docs/tune.md explains why method "auto" does not use it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub._src.tools.bench.cases import PALLAS
from jax_ub._src.tools.devices import AXIS, Ranks
from jax_ub._src.tools.options import Shape
from jax_ub._src.tools.timing import Candidate, fastest

# The kernel's instructions (wgmma) exist only on GPUs of this compute capability.
_HOPPER = "9.0"
_DTYPES = ("bfloat16", "float16")
_TILE_K = 64
_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a warpgroup, and the dimension along which a block has two of them.

    With four steps of 64 columns in flight, the operands fit into 227 KiB.
    """

    rows: int
    columns: int
    doubled: str  # "M" or "N"

    def divides(self, rows: int, columns: int) -> bool:
        """Returns whether thread blocks cover exactly a rank's rows and columns."""
        block_rows = self.rows * (1 + (self.doubled == "M"))
        block_columns = self.columns * (1 + (self.doubled == "N"))
        return rows % block_rows == columns % block_columns == 0


TILES = (Tile(128, 128, "N"), Tile(128, 128, "M"), Tile(128, 64, "N"))


def tiles_of(shape: Shape, num_ranks: int) -> list[Tile]:
    """Returns the tiles with which the kernel can multiply these global sizes."""
    if shape.K % _TILE_K:
        return []
    local = shape.M // num_ranks, shape.N // num_ranks
    return [tile for tile in TILES if tile.divides(*local)]


def why_not(
    shape: Shape, dtype: str, num_ranks: int, compute_capability: str
) -> str | None:
    """Returns the reason why JAX's kernel cannot run a call here, or None."""
    num_devices, num_local = jax.device_count(), jax.local_device_count()
    if compute_capability != _HOPPER:
        return f"it needs compute capability {_HOPPER}, not {compute_capability}"
    if dtype not in _DTYPES:
        return f"it multiplies {' and '.join(_DTYPES)}, not {dtype}"
    if num_devices != num_local:
        return (
            f"it is timed with all {num_devices} GPUs in one process, not {num_local}"
        )
    if not 1 < num_ranks == num_devices:
        return (
            f"it runs on all GPUs of the process, at least 2. P is {num_ranks}, and "
            f"JAX has {num_devices}: set CUDA_VISIBLE_DEVICES"
        )
    if not tiles_of(shape, num_ranks):
        return "its tiles do not divide the sizes of a rank"
    return None


def programs(
    shape: Shape, dtype: str, ranks: Ranks
) -> dict[str, Callable[..., jax.Array]] | str:
    """Returns programs of JAX's kernel by tile, or the reason why there are none."""
    capability = str(getattr(ranks.devices[0], "compute_capability", "unknown"))
    reason = why_not(shape, dtype, ranks.num_ranks, capability)
    if reason is not None:
        return reason
    try:
        from jax.experimental.pallas import mosaic_gpu
        from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as kernels
    except ImportError as error:
        return f"jax {jax.__version__} does not have it: {error}"
    # Without this barrier, a rank may write into a buffer that a peer still uses.
    if not hasattr(mosaic_gpu.CompilerParams, "skip_device_barrier"):
        return (
            f"jax {jax.__version__} runs it without a barrier between the GPUs. "
            "Install jax 0.11.2 or newer"
        )

    dimensions = kernels.MatmulDimension.__members__

    def program(tile: Tile, minor: str) -> Callable[..., jax.Array]:
        config = kernels.TuningConfig(
            tile_m=tile.rows,
            tile_n=tile.columns,
            tile_k=_TILE_K,
            max_concurrent_steps=_STEPS,
            grid_minor_dim=dimensions[minor],
            grid_tile_width=8,
            wg_dimension=dimensions[tile.doubled],
        )
        return functools.partial(
            kernels.all_gather_lhs_matmul,
            axis_name=AXIS,
            config=config,
            dtype=jnp.dtype(dtype),
        )

    return {
        f"two tiles of {tile.rows} x {tile.columns} along {tile.doubled}, grid along "
        f"{minor} first": program(tile, minor)
        for tile in tiles_of(shape, ranks.num_ranks)
        for minor in "MN"
    }


def find_fastest(
    candidate: Callable[..., Candidate], shape: Shape, dtype: str, ranks: Ranks
) -> Candidate | str:
    """Returns JAX's fastest program of AG+GEMM, or the reason why there is none."""
    found: Any = programs(shape, dtype, ranks)
    if isinstance(found, str):
        return found
    try:
        return fastest([candidate(PALLAS, run, text) for text, run in found.items()])
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return f"it failed: {str(error).splitlines()[0]}"
