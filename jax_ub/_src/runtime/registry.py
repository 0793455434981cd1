"""The mesh axes that `initialize_ub` has initialized, and their named overlaps.

A named overlap has the communication settings of one pass of a layer, such as
"qkv_fprop". Only `initialize_ub` and `destroy_ub` change the registry.
"""

import dataclasses
import math
import threading
from collections.abc import Hashable, Mapping

import numpy as np
from jax.export import is_symbolic_dim

from jax_ub._src import checks
from jax_ub._src.config.overlap_config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
    split_name,
    with_known_pass,
)
from jax_ub._src.errors import (
    ConfigurationTypeError,
    LifecycleError,
    UnknownNameError,
    UnknownOverlapError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.parallel import FPROP, PASSES
from jax_ub._src.runtime import settings, tuned_file
from jax_ub._src.runtime.communicators import DeviceGroups
from jax_ub._src.runtime.tuned_file import TunedTable

# A thread holds this lock while it changes the registry. The processes of a mesh can
# agree on only one change at a time, because the key-value store has one message per
# process. The lock is reentrant, since a signal handler may call `destroy_ub` during
# `initialize_ub`.
CHANGING = threading.RLock()

NONE, FP8 = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8


class LayerName(str):
    """A layer's path in its model, used to label calls that have no `ub_name`.

    It selects no overlap, even if `initialize_ub` configures an equal name. So a
    `LayerName` is never equal to a plain string, and JAX's tracing caches distinguish
    them.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        """Returns a hash unlike that of `str`, so that caches separate both types."""
        return hash((LayerName, str(self)))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The settings and the buffer size of one pass of a layer, such as "qkv_fprop".

    `CommOverlap` documents the fields.
    """

    name: str
    method: str
    comm_type: CommOverlapType
    config: OverlapConfig
    buffer_shape: tuple[int, ...]
    buffer_dtype: np.dtype
    mode: UserBufferQuantizationMode
    axis_name: tuple[str, ...]
    tp_size: int
    is_configured: bool

    @property
    def sends_fp8(self) -> bool:
        """Returns whether wide (non-FP8) arrays and partial sums are sent as FP8.

        Operands that are FP8 are always sent as they are.
        """
        sums_fp8 = self.mode is FP8 and self.comm_type is CommOverlapType.RS
        return self.config.wire_dtype is not None or (sums_fp8 and self.config.fp8_buf)

    @property
    def size_bytes(self) -> int:
        """Returns the size of a rank's buffer for the largest possible call, in bytes.

        Overlaps that do not run at the same time share one buffer.
        """
        return math.prod(self.buffer_shape) * self.buffer_dtype.itemsize


class CommOverlap(Overlap):
    """The settings and the buffer of all calls with one name, such as "qkv_fprop".

    `get_ub` returns it if the method is not "ring_exchange".

    Transformer Engine: `CommOverlap`.

    Attributes:
        name: the overlap's name, such as "qkv_fprop".
        method: the method's name, such as "ring_exchange".
        comm_type: whether it all-gathers or reduce-scatters.
        config: the complete configuration, including defaults.
        buffer_shape: shape `[rows, features]` of a rank's buffer at capacity.
        buffer_dtype: dtype of the buffer; uint8 for FP8.
        mode: quantization mode of the operands.
        axis_name: the mesh axis.
        tp_size: P, the size of the mesh axis.
        is_configured: whether the user configured it. Otherwise it has Transformer
            Engine's defaults.
        size_bytes: bytes of the buffer at capacity.
    """


class CommOverlapP2P(Overlap):
    """The settings and the buffer of calls whose method is "ring_exchange".

    It has the attributes of `CommOverlap`.

    Transformer Engine: `CommOverlapP2P`.
    """


# This text is part of the reason for a fallback to plain JAX if a call needs a larger
# shape than `initialize_ub` was given. The lowering rule searches reasons for this
# text, in order to add a reference to a page of the documentation.
TOO_SMALL = "but the buffers"


@dataclasses.dataclass(frozen=True)
class InitializedAxis:
    """A mesh axis for which `initialize_ub` was called, with its configuration.

    `overlaps` has the settings of each pass of each layer, by its name, such as
    "qkv_fprop", and quantization mode.
    """

    axis_name: tuple[str, ...]
    tp_size: int
    shape: tuple[int, int]  # [T, H]
    dtype: np.dtype
    modes: tuple[UserBufferQuantizationMode, ...]
    overlaps: Mapping[tuple[str, UserBufferQuantizationMode], Overlap]
    device_groups: DeviceGroups
    choices: TunedTable | None = None  # tuned choices for "auto"

    def names(self) -> list[str]:
        """Returns the distinct names of the overlaps, such as "qkv_fprop"."""
        return list(dict.fromkeys(name for name, _ in self.overlaps))

    def why_too_large(self, shape: tuple[int, ...], num_splits: int) -> str | None:
        """Returns why a call does not fit into the axis's buffers, or None if it does.

        A call with symbolic sizes runs as plain `jax.lax` or is rejected anyway.
        """
        if any(map(is_symbolic_dim, shape)):
            return None
        tokens, hidden = self.shape
        *batch, rows, features = (1, 1, *shape)
        needed, holds = math.prod(batch) * rows, tokens * hidden
        if needed * features <= holds:
            if not self.device_groups.any_spans_processes:
                return None
            # If all ranks are in one process, receive buffers are allocated for each
            # call. If several processes share memory, its size is fixed, and it must
            # also contain the padding of uneven splits.
            holds = self.device_groups.capacity
            num_chunks = self.tp_size * num_splits
            needed = math.prod(batch) * checks.round_up(rows, num_chunks)
            if needed * features <= holds:
                return None
        wanted = (checks.ceil_div(needed * features, hidden), hidden)
        if features > hidden:
            wanted = (max(needed, checks.ceil_div(tokens * hidden, features)), features)
        axes = self.axis_name[0] if len(self.axis_name) == 1 else self.axis_name
        return (
            f"it communicates {needed} tokens of {features} features, "
            f"{needed * features} elements, {TOO_SMALL} of axis {shown(axes)} hold "
            f"{holds}, for shape = {self.shape}. Call initialize_ub(shape={wanted}, "
            "...)"
        )


_AXES: dict[tuple[str, ...], InitializedAxis] = {}
_configuration = object()


def configuration() -> Hashable:
    """Returns a hashable value that changes with every setting that tracing reads.

    These are the named overlaps, the default method and the tuned file. Caches of
    traced functions include it in their keys, since tracing looks up names and methods.
    """
    path = settings.tuned()
    version = None if path is None else settings.version_of_file(path)
    return _configuration, settings.method(), path, version


def _change():
    global _configuration
    _configuration = object()


def add(axis: InitializedAxis) -> None:
    """Registers an initialized axis, so that calls find its overlaps by their names."""
    _AXES[axis.axis_name] = axis
    _change()


def remove(axis_name: tuple[str, ...]) -> None:
    """Removes a mesh axis and its named overlaps, if it is registered."""
    _change()  # before as well as after, in case an interrupt comes in between
    _AXES.pop(axis_name, None)
    _change()


def axes() -> tuple[InitializedAxis, ...]:
    """Returns all initialized mesh axes, in the order of `initialize_ub` calls."""
    return tuple(_AXES.values())


def on_axis(axis_name: tuple[str, ...], num_ranks: int) -> InitializedAxis | None:
    """Returns the initialized mesh axis if it has `num_ranks` ranks, else None."""
    axis = _AXES.get(axis_name)
    return axis if axis is not None and axis.tp_size == num_ranks else None


def tuned_table(axis_name: tuple[str, ...], num_ranks: int) -> TunedTable | None:
    """Returns the table from which "auto" calls take the fastest methods, or None.

    A table that `initialize_ub` was given for this axis takes precedence over the file
    `JAX_UB_TUNED`. A GEMM that does not communicate has the axis (). For such a GEMM,
    the table of all initialized axes that have one takes precedence, if it is the same.
    """
    searched = [on_axis(axis_name, num_ranks)] if axis_name else axes()
    found = {axis.choices for axis in searched if axis is not None and axis.choices}
    return found.pop() if len(found) == 1 else tuned_file.process_table()


# Checks the argument `use_fp8`. Without the check, a quantization mode that is passed
# by mistake would count as True.
check_use_fp8 = checks.option_check(
    lambda value: isinstance(value, int | np.bool_) and value in (0, 1),
    "a bool",
    "Pass True or False; modes go in initialize_ub(quantization_modes=[...]).",
    ConfigurationTypeError,
)


def get(name: str, use_fp8: bool, axis_name: tuple[str, ...] | None) -> Overlap:
    """Implements `get_ub`: returns the settings and buffer size of a named overlap."""
    label = f"get_ub({shown(name)})"
    check_use_fp8(label, "use_fp8", use_fp8)
    if not isinstance(name, str):
        raise ConfigurationTypeError(
            f"{label}: the name is of type {type(name).__name__}. Pass a string, such "
            'as "qkv_fprop".'
        )
    if not _AXES:
        raise LifecycleError(
            f"{label}: no axis is initialized. Call ub.initialize_ub first."
        )
    mode = FP8 if use_fp8 else NONE
    searched = [axis for axis in axes() if axis_name in (None, axis.axis_name)]
    if not searched:
        raise UnknownOverlapError(
            f"{label}: axis_name = {shown(axis_name)} is not initialized. Pass one of "
            f"{shown(list(_AXES))}, or call ub.initialize_ub for it."
        )
    found = [
        axis.overlaps[name, mode] for axis in searched if (name, mode) in axis.overlaps
    ]
    if len(found) > 1:
        names = ", ".join(repr(overlap.axis_name) for overlap in found)
        raise UnknownOverlapError(
            f"{label}: several axes have it: {names}. Pass axis_name=."
        )
    if not found:
        raise UnknownOverlapError(f"{label}: {_why_missing(name, use_fp8, searched)}")
    return found[0]


def _why_missing(name, use_fp8, searched):
    known = dict.fromkeys(name for axis in searched for name in axis.names())
    if name in known:
        modes = sorted({mode.name for axis in searched for mode in axis.modes})
        return (
            f"with use_fp8 = {shown(use_fp8)} it does not exist. initialize_ub was "
            f"called for quantization_modes {modes} only. Pass "
            f"use_fp8={not use_fp8}, or call initialize_ub with both modes."
        )
    return f"no overlap has this name. {nearest(with_known_pass(name), known)}"


def find(
    label: str,
    axis_name: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None,
    *,
    is_fp8: bool = False,
) -> dict[str, Overlap]:
    """Returns what `initialize_ub` has configured for a layer: an overlap per pass.

    Args:
        label: the call, for errors.
        axis_name: the mesh axis of the call.
        num_ranks: the size of the mesh axis.
        ub_name: the layer's name. "qkv" finds the overlaps "qkv_fprop", "qkv_dgrad" and
            "qkv_wgrad", as far as they exist. Each of these full names also finds all
            of them. An overlap whose name does not end in a pass is used in the forward
            pass.
        is_fp8: whether the operands are FP8. Such a layer uses the overlaps of mode FP8
            if there are any, else those of mode NONE.

    Returns:
        The overlaps by pass: "fprop", "dgrad" and "wgrad". Empty if the axis is not
        initialized, or if `ub_name` is a `LayerName`: it is then only a label.

    Raises:
        UnknownNameError: if the axis is initialized, but has no overlap of this name.
        UnsupportedOverlapError: if the axis is initialized for another number of ranks,
            or the overlap for FP8 buffers only.
    """
    axis = _AXES.get(axis_name)
    if axis is None or ub_name is None or isinstance(ub_name, LayerName):
        return {}
    layer, _ = split_name(ub_name)
    mode = FP8 if is_fp8 and FP8 in axis.modes else NONE
    found = {}
    for direction in PASSES:
        overlap = axis.overlaps.get((f"{layer}_{direction}", mode))
        if overlap is None and direction == FPROP:
            overlap = axis.overlaps.get((layer, mode))
        if overlap is not None:
            found[direction] = overlap
    if not found:
        raise _unknown_layer(label, axis, ub_name, layer)
    if axis.tp_size != num_ranks:
        raise UnsupportedOverlapError(
            f"{label}: axis {shown(axis_name)} has {num_ranks} ranks here, but "
            f"initialize_ub was called for {axis.tp_size}. Use another axis name for "
            "the other mesh, and initialize that axis too."
        )
    return found


def _unknown_layer(label, axis, ub_name, layer):
    known = dict.fromkeys(split_name(name)[0] for name in axis.names())
    if layer in known:
        return UnsupportedOverlapError(
            f"{label}: {shown(ub_name)} is initialized for FP8 buffers only, but the "
            "operands are not FP8. Pass initialize_ub(quantization_modes=[NONE, FP8])."
        )
    meant, _ = split_name(with_known_pass(ub_name))
    return UnknownNameError(
        f"{label}: axis {axis.axis_name} has no overlap {shown(ub_name)}. "
        f"{nearest(meant, known)} Configure it in initialize_ub(ub_cfgs=...), or "
        "leave ub_name out."
    )
