"""Builds an axis's named overlaps from defaults and the user's configuration."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ub._src.config.config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
)
from jax_ub._src.config.resolve import AUTOMATIC, read_entries, resolve
from jax_ub._src.initialize.arguments import per_mode
from jax_ub._src.methods import Method
from jax_ub._src.primitives.mesh import rank_groups
from jax_ub._src.runtime import overlaps, tuned
from jax_ub._src.runtime.overlaps import (
    CommOverlap,
    CommOverlapP2P,
    InitializedAxis,
    Overlap,
)


def make_initialized_axis(
    axes: tuple[str, ...],
    tp_size: int,
    shape: tuple[int, int],
    dtype: np.dtype,
    modes: Sequence[UserBufferQuantizationMode],
    ub_cfgs: Mapping | Sequence[Mapping] | str | os.PathLike | None,
    mesh: Mesh,
) -> InitializedAxis:
    """Configures the named overlaps of a mesh axis, without allocating buffers.

    Args:
        axes: the mesh axes of the ranks.
        tp_size: P, the number of ranks of a group.
        shape: the capacity, `[T, H]`.
        dtype: the dtype of unquantized operands.
        modes: the quantization modes for which to create overlaps.
        ub_cfgs: the argument of `initialize_ub`.
        mesh: the mesh; the sizes of `axes` in it multiply to `tp_size`.

    Raises:
        ConfigurationError: if a value is out of range, or the configurations contradict
            each other.
        ConfigurationTypeError: if a value has the wrong type.
        UnknownNameError: if a name, a key or a method is unknown.
    """
    # Stored even if `initialize_ub` was given no file, since the processes compare it.
    choices = tuned.of_process()
    if isinstance(ub_cfgs, str | os.PathLike):
        choices, ub_cfgs = tuned.read(os.fspath(ub_cfgs)), AUTOMATIC
    found = {}
    for mode, cfgs in zip(modes, per_mode(ub_cfgs, modes), strict=True):
        entries = read_entries(cfgs)
        for name, config in resolve(entries, tp_size, mode).items():
            found[name, mode] = _overlap(
                config,
                shape,
                dtype,
                name=name,
                mode=mode,
                axis_name=axes,
                tp_size=tp_size,
                is_configured=name in entries,
            )
    table = rank_groups(mesh, axes, [device.id for device in mesh.devices.flat])
    owners = rank_groups(
        mesh, axes, [device.process_index for device in mesh.devices.flat]
    )
    return InitializedAxis(
        axes,
        tp_size,
        shape,
        dtype,
        tuple(modes),
        found,
        groups=tuple(map(tuple, table.tolist())),
        num_local_ranks=int((owners == jax.process_index()).sum()),
        spans_processes=bool((owners != owners[:, :1]).any()),
        choices=choices,
    )


def _overlap(
    config: OverlapConfig,
    shape: tuple[int, int],
    dtype: np.dtype,
    *,
    mode: UserBufferQuantizationMode,
    tp_size: int,
    **others: Any,
) -> Overlap:
    is_ring = config.method == Method.RING_EXCHANGE.value
    rows = shape[0]
    if is_ring and config.comm_type is CommOverlapType.RS:
        # A rank's buffer holds its P partial sums of T / P rows each, and P - 1 partial
        # sums that its peers send for its rows: (2 P - 1) T / P rows, rounded up.
        rows = -(-rows * (2 * tp_size - 1) // tp_size)
    is_fp8 = mode is overlaps.FP8 and config.fp8_buf
    return (CommOverlapP2P if is_ring else CommOverlap)(
        method=config.method,
        comm_type=config.comm_type,
        config=config,
        buffer_shape=(rows, shape[1]),
        buffer_dtype=jnp.dtype(jnp.uint8) if is_fp8 else dtype,
        mode=mode,
        tp_size=tp_size,
        **others,
    )
