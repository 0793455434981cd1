"""Checks the arguments of `initialize_ub`, and converts them to internal types."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ub._src import checks, dtypes
from jax_ub._src.config.overlap_config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
)
from jax_ub._src.config.ub_cfgs import AUTOMATIC, read_entries, resolve
from jax_ub._src.errors import ConfigurationError, ConfigurationTypeError, shown
from jax_ub._src.methods import DEFAULT_SPLITS, Method
from jax_ub._src.runtime import cuda_engine, registry, settings, tuned_file
from jax_ub._src.runtime.communicators import DeviceGroups, rank_groups
from jax_ub._src.runtime.registry import (
    CommOverlap,
    CommOverlapP2P,
    InitializedAxis,
    Overlap,
)
from jax_ub._src.scalars import is_integer

# Largest number of elements T * H of the argument `shape`, (T, H). With this limit, the
# size of all ranks' buffers in bytes fits into 64 bits.
_MOST_ELEMENTS = 1 << 48


def read_modes(use_fp8: Any, modes: Any) -> tuple[UserBufferQuantizationMode, ...]:
    """Returns the quantization modes that `initialize_ub` configures, after checks.

    Returns:
        The checked modes: those that were passed, else FP8 or NONE by `use_fp8`.
    """
    registry.check_use_fp8("initialize_ub", "use_fp8", use_fp8)
    if modes is not None and not isinstance(modes, list | tuple):
        raise ConfigurationTypeError(
            f"initialize_ub: quantization_modes = {shown(modes)} is not a list. "
            "Pass one, such as [ub.UserBufferQuantizationMode.NONE]."
        )
    if not modes:
        return (registry.FP8 if use_fp8 else registry.NONE,)
    for mode in modes:
        if not isinstance(mode, UserBufferQuantizationMode):
            raise ConfigurationTypeError(
                f"initialize_ub: quantization_modes has {shown(mode)}, which is not a "
                "ub.UserBufferQuantizationMode. Pass its members."
            )
    if len(set(modes)) != len(modes) or (use_fp8 and registry.FP8 not in modes):
        raise ConfigurationError(
            f"initialize_ub: quantization_modes = {list(modes)} with use_fp8 = "
            f"{use_fp8}. Pass each mode once, and leave use_fp8 out."
        )
    return tuple(modes)


def read_size(name: str, value: Any) -> int:
    """Returns a size as an int, after checking that it is an integer of at least 1."""
    found = f"initialize_ub: {name} = {shown(value)} is"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigurationTypeError(f"{found} not an integer. Pass 1 or more.")
    if value < 1:
        raise ConfigurationError(f"{found} not positive. Pass 1 or more.")
    if not is_integer(value):
        raise ConfigurationError(f"{found} too large. Pass less than 2**63.")
    return int(value)


def read_shape(shape: Any) -> tuple[int, int]:
    """Checks the buffer capacity, (tokens of all ranks, features), and returns it."""
    is_sequence = isinstance(shape, Sequence) and not isinstance(shape, str | bytes)
    if not (is_sequence or np.ndim(shape) == 1) or len(shape) != 2:
        raise ConfigurationError(
            f"initialize_ub: shape = {shown(shape)} is not two sizes. Pass "
            "[tokens of all ranks, features]."
        )
    sizes = read_size("shape[0]", shape[0]), read_size("shape[1]", shape[1])
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise ConfigurationError(
            f"initialize_ub: shape = {sizes} has more than 2**48 elements. Pass "
            "[tokens of all ranks, features]."
        )
    return sizes


def read_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of unquantized operands, after checking it."""
    found = checks.dtype_of(dtype)
    if found is None or found not in dtypes.OPERANDS:
        raise ConfigurationError(
            f"initialize_ub: dtype = {shown(dtype)} is not one of "
            f"{dtypes.listed(dtypes.OPERANDS)}. FP8 buffers are a quantization mode: "
            "quantization_modes=[FP8]."
        )
    return found


def read_mesh(mesh: Any, axes: tuple[str, ...], tp_size: int) -> Mesh:
    """Returns the mesh, after checking that its `axes` have `tp_size` ranks.

    An empty mesh is replaced by one whose groups are consecutive devices.
    """
    if not isinstance(mesh, Mesh):
        raise ConfigurationTypeError(
            f"initialize_ub: mesh = {shown(mesh)} has no devices. Pass a "
            "jax.sharding.Mesh."
        )
    if mesh.empty:
        return _consecutive(axes, tp_size)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ConfigurationError(
            f"initialize_ub: the mesh has the axes {tuple(mesh.axis_names)}, not "
            f"{shown(missing[0])}. Pass the axis of the ranks as axis_name=."
        )
    size = math.prod(mesh.shape[axis] for axis in axes)
    if size != tp_size:
        raise ConfigurationError(
            f"initialize_ub: tp_size = {tp_size}, but axis {axes} of the mesh has "
            f"{size} devices. {_fix(f'Pass tp_size={size}, or another mesh.')}"
        )
    return mesh


def _fix(otherwise):
    """Returns advice for missing devices: to join the job first, or else `otherwise`.

    A process that `python -m jax_ub launch` has started sees only its own devices until
    it calls `jax.distributed.initialize`.
    """
    if settings.has_coordinator() and not jax.distributed.is_initialized():
        return (
            "JAX_COORDINATOR_ADDRESS is set, but this process has not joined the other "
            "processes. Call jax.distributed.initialize() before any other function "
            "of JAX."
        )
    return otherwise


def _consecutive(axes, tp_size):
    devices = jax.devices()
    if len(devices) < tp_size:
        raise ConfigurationError(
            f"initialize_ub: tp_size = {tp_size}, but jax has {len(devices)} devices. "
            + _fix(
                f"Pass at most {len(devices)}, or start jax with more; on CPUs "
                f'jax.config.update("jax_num_cpu_devices", {tp_size}) before its first '
                "use."
            )
        )
    if len(axes) > 1 or len(devices) % tp_size:
        raise ConfigurationError(
            f"initialize_ub: {len(devices)} devices cannot be divided into groups of "
            f"tp_size = {tp_size} on {axes}. Pass mesh=, which arranges them."
        )
    groups = np.array(devices).reshape(-1, tp_size)
    return Mesh(groups, (f"replicas of {axes[0]}", *axes))


def per_mode(
    ub_cfgs: Any, modes: Sequence[UserBufferQuantizationMode]
) -> Sequence[Mapping | None]:
    """Returns one dictionary of overlap settings per quantization mode.

    A single dictionary applies to all modes.
    """
    if ub_cfgs is None or isinstance(ub_cfgs, Mapping):
        return [ub_cfgs] * len(modes)
    if not isinstance(ub_cfgs, list | tuple):
        raise ConfigurationTypeError(
            f"initialize_ub: ub_cfgs = {shown(ub_cfgs)} is not a dictionary. Pass one "
            "of names, or a list with one for each quantization mode."
        )
    if len(ub_cfgs) != len(modes):
        raise ConfigurationError(
            f"initialize_ub: ub_cfgs has {len(ub_cfgs)} dictionaries for {len(modes)} "
            "quantization modes. Pass one for each, or a single one for all."
        )
    return ub_cfgs


def make_initialized_axis(
    axes: tuple[str, ...],
    tp_size: int,
    shape: tuple[int, int],
    dtype: np.dtype,
    modes: Sequence[UserBufferQuantizationMode],
    ub_cfgs: Mapping | Sequence[Mapping] | str | os.PathLike | None,
    mesh: Mesh,
) -> InitializedAxis:
    """Creates the `InitializedAxis` for checked arguments of `initialize_ub`.

    It contains the named overlaps of a mesh axis. Allocates no buffers. `ub_cfgs` is
    checked here.
    """
    # If `ub_cfgs` is not the path of a tuned file, the methods come from the file that
    # `JAX_UB_TUNED` names. The processes compare the methods, which must be equal in
    # all of them.
    if not isinstance(ub_cfgs, str | os.PathLike):
        choices = tuned_file.process_table()
    else:
        source, path = "initialize_ub: ub_cfgs", os.fspath(ub_cfgs)
        choices, ub_cfgs = tuned_file.read_table(source, path), AUTOMATIC
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
    devices = list(mesh.devices.flat)
    own = [d for d in devices if d.process_index == jax.process_index()]
    splits = (overlap.config.num_splits for overlap in found.values())
    num_chunks = tp_size * max(DEFAULT_SPLITS, *splits)
    device_groups = DeviceGroups(
        rank_groups(mesh, axes, [device.id for device in devices]),
        process_of={device.id: device.process_index for device in devices},
        process=jax.process_index(),
        platform=cuda_engine.platform_of(devices[0]),
        # All slots have the size of the largest chunk. If the rows do not divide evenly
        # into chunks, each chunk therefore needs up to one additional row.
        capacity=(shape[0] + num_chunks) * shape[1],
        # The number of receive buffers (slots) per rank. An all-reduce needs the most
        # slots: one per chunk for its reduce-scatter, and one per chunk for its
        # all-gather.
        num_slots=2 * num_chunks,
        name=f"initialize_ub(axis_name={shown(axes)})",
        ordinals={d.id: d.local_hardware_id for d in own if cuda_engine.is_cuda(d)},
        client=own[0].client,
    )
    return InitializedAxis(
        axes, tp_size, shape, dtype, tuple(modes), found, device_groups, choices
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
        # A rank's buffer contains its P partial sums of T / P rows each, and the P - 1
        # partial sums of its own rows that its peers send. Together these are (2 P - 1)
        # T / P rows, rounded up.
        rows = checks.ceil_div(rows * (2 * tp_size - 1), tp_size)
    is_fp8 = config.wire_dtype is not None or (mode is registry.FP8 and config.fp8_buf)
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
