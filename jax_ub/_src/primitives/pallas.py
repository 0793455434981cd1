"""JAX's own AG+GEMM in Pallas, which a tuned file may choose on GPUs.

The kernel of `jax.experimental.pallas.ops.gpu.collective_matmul_mgpu` is imported only
where it can run. docs/tune.md says why it must be allowed explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters import mlir

from jax_ub._src import lowering_log
from jax_ub._src.methods import PALLAS_TILES, PallasTiles
from jax_ub._src.runtime import settings

if TYPE_CHECKING:
    from jax_ub._src.primitives.matmuls import AllGatherMatmul
    from jax_ub._src.primitives.mesh import Ranks

# Compute capability of Hopper GPUs. Only Hopper has the matrix instructions (wgmma)
# that the Pallas kernel uses.
_HOPPER = "9.0"
DTYPES = ("bfloat16", "float16")  # which the Pallas kernel multiplies
# The kernel loads _TILE_K columns of its operands at a time, and has _STEPS of these
# loads in flight. With these values, the loaded columns fit into the 227 KiB of shared
# memory of a multiprocessor for all `PALLAS_TILES`.
_TILE_K = 64
_STEPS = 4
_GRID_TILE_WIDTH = 8


def tiles_for(M: int, K: int, N: int, num_ranks: int) -> list[PallasTiles]:
    """Returns the tile sizes of JAX's Pallas AG+GEMM kernel that fit these sizes."""
    if K % _TILE_K:
        return []
    local = M // num_ranks, N // num_ranks
    return [tiles for tiles in PALLAS_TILES if tiles.divide(*local)]


def why_not(
    devices: Sequence[jax.Device], dtype: Any, M: int, K: int, N: int
) -> str | None:
    """Returns why JAX's Pallas AG+GEMM kernel cannot run on `devices`, or None.

    `devices` has the device of each rank. M, K and N are the sizes of the global GEMM,
    whose operands and result have dtype `dtype`.
    """
    num_ranks = len(devices)
    capability = str(getattr(devices[0], "compute_capability", "unknown"))
    if capability != _HOPPER:
        return f"it needs compute capability {_HOPPER}, not {capability}"
    if str(dtype) not in DTYPES:
        return f"it multiplies {' and '.join(DTYPES)}, not {dtype}"
    if jax.process_count() > 1:
        return f"it needs all GPUs in one process, not in {jax.process_count()}"
    if num_ranks < 2 or list(devices) != jax.devices():
        return (
            "its ranks must be all devices of the process, at least 2, in the order of "
            f"jax.devices(). P is {num_ranks}, and JAX has {jax.device_count()} "
            "devices. CUDA_VISIBLE_DEVICES hides devices from JAX"
        )
    if not tiles_for(M, K, N, num_ranks):
        return "its tiles do not divide the sizes of a rank"
    return _why_not_installed()


def _why_not_installed():
    try:
        from jax.experimental.pallas import mosaic_gpu
        from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu  # noqa: F401
    except ImportError as error:
        return f"jax {jax.__version__} does not have it: {error}"
    # JAX versions without this parameter run the kernel without a barrier between the
    # GPUs, so that a rank might write to a buffer that a peer still uses.
    if not hasattr(mosaic_gpu.CompilerParams, "skip_device_barrier"):
        return (
            f"jax {jax.__version__} runs it without a barrier between the GPUs. "
            "Install jax 0.11.2 or newer"
        )
    return None


def why_not_call(
    ctx: mlir.LoweringRuleContext,
    call: AllGatherMatmul,
    ranks: Ranks,
    tiles: PallasTiles,
) -> str | None:
    """Returns why JAX's Pallas AG+GEMM kernel cannot run a lowered call, or None.

    A tuned table has chosen the kernel, and these tiles, for the call.
    """
    avals: Sequence[Any] = ctx.avals_in
    x, w = avals[:2]
    _, M, K, N = call.global_sizes(avals)
    dtypes = dict.fromkeys(map(str, (x.dtype, w.dtype, call.out_dtype)))
    checks = (
        (len(call.axis_name) > 1, "it runs on one mesh axis, not several"),
        (call.num_kernels > 1, f"it multiplies one kernel, not {call.num_kernels}"),
        (call.rhs_transposed, "it takes no kernel [out, in]"),
        (call.return_gathered, "it does not return the gathered x"),
        (call.has_bias or call.has_residual, "it adds no bias and no residual"),
        (call.scale != 1, "it does not scale the product"),
        (math.prod(x.shape[:-2]) != 1, "it takes no leading axes of x"),
        (len(dtypes) > 1, f"it has one dtype, not {' and '.join(dtypes)}"),
        (
            ctx.module_context.lowering_parameters.for_export,
            "it is not part of an exported program",
        ),
        # The Pallas kernel occupies all multiprocessors while it waits for its peers.
        # If one rank starts this kernel first, and another rank starts a collective of
        # XLA first, both wait forever.
        (
            not settings.orders_collectives(),
            "XLA may run a collective at the same time, and both would wait for each "
            f"other. Add {settings.COLLECTIVES_IN_ORDER} to XLA_FLAGS",
        ),
    )
    reasons = (reason for applies, reason in checks if applies)
    reason = next(reasons, None) or why_not(ranks.groups[0], x.dtype, M, K, N)
    if reason is None and tiles not in tiles_for(M, K, N, call.num_ranks):
        return "the tuned tiles do not divide the sizes of a rank"
    return reason


def lower(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    call: AllGatherMatmul,
    tiles: PallasTiles,
) -> Sequence[Any]:
    """Lowers a call to JAX's Pallas kernel that overlaps all-gather and GEMM."""
    (axis_name,) = call.axis_name
    lowering_log.record(ctx, call, call.method, tiles=tiles)

    def kernel(x, w):
        with jax.named_scope("jax_ub.pallas"):  # names the kernel in profiles
            return [all_gather_matmul(x, w, axis_name=axis_name, tiles=tiles)]

    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


def all_gather_matmul(
    x: jax.Array, w: jax.Array, *, axis_name: str, tiles: PallasTiles
) -> jax.Array:
    """Computes `all_gather(x) @ w` by JAX's Pallas kernel, inside a `jax.shard_map`.

    Args:
        x: activations, `[..., m, K]`: this rank's rows. Leading axes have size 1.
        w: kernel, `[K, N]`, of the dtype of x.
        axis_name: the mesh axis of the ranks.
        tiles: the tiles to multiply with.
    """
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as kernels

    dimensions = kernels.MatmulDimension.__members__
    config = kernels.TuningConfig(
        tile_m=tiles.rows,
        tile_n=tiles.columns,
        tile_k=_TILE_K,
        max_concurrent_steps=_STEPS,
        grid_minor_dim=dimensions[tiles.minor],
        grid_tile_width=_GRID_TILE_WIDTH,
        wg_dimension=dimensions[tiles.doubled],
    )
    y = kernels.all_gather_lhs_matmul(
        x.reshape(x.shape[-2:]), w, axis_name, config=config, dtype=x.dtype
    )
    return y.reshape(*x.shape[:-2], *y.shape)
