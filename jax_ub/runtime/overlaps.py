"""The registry of named overlaps: what `initialize_ub` made, by mesh axis.

Only `initialize_ub` and `destroy_ub` change it.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping

import numpy as np

from jax_ub.errors import (
    ConfigurationTypeError,
    LifecycleError,
    UnknownNameError,
    UnknownOverlapError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.methods import DEFAULT_SPLITS
from jax_ub.overlap_config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
    names,
)
from jax_ub.overlap_config.tuned import TunedTable
from jax_ub.runtime import settings

NONE, FP8 = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8


class LayerName(str):
    """A layer's place in its model: a label, unless an overlap has just this name.

    It differs from a string of the same text, so that caches of what was traced do not
    take one for the other: an unknown `ub_name` is an error, an unknown path is not.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether the other one is a path too, of the same text."""
        return isinstance(other, LayerName) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        """Whether the other one is no such path."""
        return not self == other

    def __hash__(self) -> int:
        """Differs from the hash of the text."""
        return hash((LayerName, str(self)))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One named overlap: how the calls of its name communicate, and in which buffer.

    Attributes:
        name: such as "qkv_fprop".
        method: such as "ring_exchange".
        comm_type: whether it gathers or reduce-scatters.
        config: all keys of its configuration.
        buffer_shape: `[rows, features]` of what a rank's buffer holds at capacity.
        buffer_dtype: dtype of that; uint8 for FP8.
        mode: of the operands.
        axis_name: its mesh axis.
        tp_size: P, the size of that.
        is_configured: whether the user configured it; else it has Transformer Engine's
            defaults.
        size_bytes: of the buffer at capacity.
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
    def size_bytes(self) -> int:
        """Bytes of the buffer at capacity; names that do not run together share it."""
        return math.prod(self.buffer_shape) * self.buffer_dtype.itemsize


class CommOverlap(Overlap):
    """An overlap whose ranks communicate all together, as collectives do.

    Transformer Engine: `CommOverlap`. Attributes: see `runtime.overlaps.Overlap`.
    """


class CommOverlapP2P(Overlap):
    """An overlap whose chunks go from rank to rank: `ring_exchange`.

    Transformer Engine: `CommOverlapP2P`. Attributes: see `runtime.overlaps.Overlap`.
    """


@dataclasses.dataclass(frozen=True)
class InitializedAxis:
    """One call of `initialize_ub`: the overlaps on one mesh axis."""

    axis_name: tuple[str, ...]
    tp_size: int
    shape: tuple[int, int]  # [T, H]
    dtype: np.dtype
    modes: tuple[UserBufferQuantizationMode, ...]
    overlaps: Mapping[tuple[str, UserBufferQuantizationMode], Overlap]
    groups: tuple[tuple[int, ...], ...]  # global device ids, in the order of ranks
    num_local_ranks: int  # in this process
    spans_processes: bool  # whether a group has ranks in several processes
    choices: TunedTable | None = None  # what "auto" takes for known sizes

    def names(self) -> list[str]:
        """The names, each once."""
        return list(dict.fromkeys(name for name, _ in self.overlaps))

    @property
    def capacity(self) -> int:
        """Elements that shared buffers hold: T tokens, and a row more for every piece.

        Rows that do not divide by the ranks, or their shares by the splits, travel in
        slots of the size of the largest piece.
        """
        tokens, hidden = self.shape
        return (tokens + self.tp_size * self._most_splits) * hidden

    @property
    def _most_splits(self):
        splits = (overlap.config.num_splits for overlap in self.overlaps.values())
        return max(DEFAULT_SPLITS, *splits)

    @property
    def num_slots(self) -> int:
        """The most slots of a rank: an all-reduce has those of RS and of AG."""
        return 2 * self.tp_size * self._most_splits

    def why_too_large(self, shape: tuple[int, ...], num_splits: int) -> str | None:
        """Says why a call communicates more than the buffers hold; None if it does not.

        Args:
            shape: `[..., rows, features]`: what the ranks gather or sum.
            num_splits: into how many pieces the call cuts a rank's share.
        """
        tokens, hidden = self.shape
        *batch, rows, features = (1, 1, *shape)
        needed, holds = math.prod(batch) * rows, tokens * hidden
        if needed * features <= holds:
            if not self.spans_processes:
                return None
            # In one process slots come and go with the calls. Shared ones are made.
            holds = self.capacity
            needed = math.prod(batch) * _padded(rows, self.tp_size * num_splits)
            if needed * features <= holds:
                return None
        wanted = (-(-needed * features // hidden), hidden)
        if features > hidden:
            wanted = (max(needed, -(-tokens * hidden // features)), features)
        axes = self.axis_name[0] if len(self.axis_name) == 1 else self.axis_name
        return (
            f"it communicates {needed} tokens of {features} features, "
            f"{needed * features} elements, but the buffers of axis {shown(axes)} hold "
            f"{holds}, for shape = {self.shape}. Call initialize_ub(shape={wanted}, "
            "...)"
        )


def _padded(rows, pieces):
    return -(-rows // pieces) * pieces


_DOMAINS: dict[tuple[str, ...], InitializedAxis] = {}
_configuration = object()


def configuration() -> Hashable:
    """Stands for all that is configured: another value after every change.

    For caches of what was traced, where names and methods are looked up in the trace.
    """
    path = settings.tuned()
    version = None if path is None else settings.version_of_file(path)
    return _configuration, settings.method(), path, version


def _change():
    global _configuration
    _configuration = object()


def add(initialized_axis: InitializedAxis) -> None:
    """Makes the overlaps of an axis known; there are none yet."""
    _DOMAINS[initialized_axis.axis_name] = initialized_axis
    _change()


def remove(axis_name: tuple[str, ...]) -> None:
    """Forgets the overlaps of an axis, if there are any."""
    _change()  # an interrupt may come between the next two lines
    _DOMAINS.pop(axis_name, None)
    _change()


def domains() -> tuple[InitializedAxis, ...]:
    """All that is initialised, in the order of their calls."""
    return tuple(_DOMAINS.values())


def on_axis(axis_name: tuple[str, ...], num_ranks: int) -> InitializedAxis | None:
    """What was initialised for an axis of this name and size."""
    initialized_axis = _DOMAINS.get(axis_name)
    return (
        initialized_axis
        if initialized_axis is not None and initialized_axis.tp_size == num_ranks
        else None
    )


def check_use_fp8(label: str, use_fp8: object) -> None:
    """Refuses what is neither true nor false; a mode, for one, is always true.

    Raises:
        ConfigurationTypeError: says where modes go.
    """
    if not isinstance(use_fp8, int | np.bool_):
        raise ConfigurationTypeError(
            f"{label}: use_fp8 = {shown(use_fp8)} is of type {type(use_fp8).__name__}. "
            "Pass True or False; modes go in initialize_ub(quantization_modes=[...])."
        )


def get(name: str, use_fp8: bool, axis_name: tuple[str, ...] | None) -> Overlap:
    """Finds one overlap for `get_ub`.

    Raises:
        LifecycleError: if nothing was initialised.
        ConfigurationTypeError: if `use_fp8` is a quantization mode, or the name is no
            string.
        UnknownOverlapError: if there is none of that name, or one on several axes.
    """
    check_use_fp8(f"get_ub({shown(name)})", use_fp8)
    if not isinstance(name, str):
        raise ConfigurationTypeError(
            f"get_ub({shown(name)}): the name is of type {type(name).__name__}. Pass "
            "one "
            'such as "qkv_fprop".'
        )
    if not _DOMAINS:
        raise LifecycleError(
            f"get_ub({shown(name)}): nothing was initialised. Call ub.initialize_ub "
            "first."
        )
    mode = FP8 if use_fp8 else NONE
    places = [d for d in domains() if axis_name in (None, d.axis_name)]
    found = [d.overlaps[name, mode] for d in places if (name, mode) in d.overlaps]
    if len(found) == 1:
        return found[0]
    if found:
        axes = ", ".join(repr(one.axis_name) for one in found)
        raise UnknownOverlapError(
            f"get_ub({shown(name)}): several axes have it: {axes}. Pass axis_name=."
        )
    raise UnknownOverlapError(_missing(name, use_fp8, places))


def _missing(name, use_fp8, places):
    if not places:
        return f"get_ub({shown(name)}): there are only the axes {list(_DOMAINS)}."
    known = dict.fromkeys(
        one for initialized_axis in places for one in initialized_axis.names()
    )
    if name in known:
        modes = sorted(
            {
                mode.name
                for initialized_axis in places
                for mode in initialized_axis.modes
            }
        )
        return (
            f"get_ub({shown(name)}, use_fp8={use_fp8}): it was initialised for "
            f"quantization_modes {modes} only."
        )
    return f"get_ub({shown(name)}): no overlap has that name. {nearest(name, known)}"


def find(
    label: str,
    axis_name: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None,
) -> dict[str, Overlap]:
    """Finds the overlaps of a call by its `ub_name`.

    Args:
        label: the call, for errors.
        axis_name: its mesh axis.
        num_ranks: the size of that axis.
        ub_name: "qkv" finds "qkv_fprop", "qkv_dgrad" and "qkv_wgrad", as far as there
            are such; the full name of one finds all of its layer, and a name without
            a pass is a forward's.

    Returns:
        By pass, "fprop", "dgrad" and "wgrad". Empty where the axis was not initialised:
        there a name is a mere label.

    Raises:
        UnknownNameError: if the axis was initialised, but has no such name.
        UnsupportedOverlapError: if it was initialised for another number of ranks, or
            for FP8 buffers only.
    """
    initialized_axis = _DOMAINS.get(axis_name)
    if initialized_axis is None or ub_name is None:
        return {}
    layer = names.split_name(ub_name)[0]
    found = {}
    for direction in names.PASSES:
        overlap = initialized_axis.overlaps.get((f"{layer}_{direction}", NONE))
        if overlap is None and direction == names.FPROP:
            overlap = initialized_axis.overlaps.get((layer, NONE))
        if overlap is not None:
            found[direction] = overlap
    if found:
        _check_size(label, initialized_axis, num_ranks)
    elif not isinstance(ub_name, LayerName):
        _refuse(label, initialized_axis, ub_name, layer)
    return found


def _check_size(label, initialized_axis, num_ranks):
    if initialized_axis.tp_size != num_ranks:
        raise UnsupportedOverlapError(
            f"{label}: axis {initialized_axis.axis_name} has {num_ranks} ranks here, "
            f"but "
            f"initialize_ub was called for {initialized_axis.tp_size}. Use another "
            f"axis name for "
            "the other mesh, and initialise that too."
        )


def _refuse(label, initialized_axis, ub_name, layer):
    known = dict.fromkeys(
        names.split_name(name)[0] for name in initialized_axis.names()
    )
    if layer in known:
        raise UnsupportedOverlapError(
            f"{label}: {shown(ub_name)} was initialised for FP8 buffers only, but the "
            "operands are not FP8. Pass initialize_ub(quantization_modes=[NONE])."
        )
    raise UnknownNameError(
        f"{label}: axis {initialized_axis.axis_name} has no overlap {shown(ub_name)}. "
        f"{nearest(ub_name, known)} Configure it in initialize_ub(ub_cfgs=...), or "
        "leave ub_name out."
    )
