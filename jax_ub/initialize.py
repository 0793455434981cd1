"""`initialize_ub` and `destroy_ub`: the life of the named overlaps and their buffers.

Transformer Engine: `module.base.initialize_ub`. Everything is checked before anything
is made, and all processes agree on the outcome, so that a call that fails leaves
nothing behind on any of them.
"""

import math
import os
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_ub import methods, shapes
from jax_ub.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LifecycleError,
)
from jax_ub.methods import Method
from jax_ub.overlap_config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
)
from jax_ub.overlap_config.resolve import AUTOMATIC, read_entries, resolve
from jax_ub.primitives.mesh import axis_tuple, rank_groups
from jax_ub.runtime import communicators, cuda, overlaps, settings, tuned
from jax_ub.runtime.bootstrap.board import check_backend
from jax_ub.runtime.bootstrap.meeting import meet
from jax_ub.runtime.overlaps import CommOverlap, CommOverlapP2P, Domain, Overlap
from jax_ub.runtime.place import Place

_Modes = Sequence[UserBufferQuantizationMode]
# So that the bytes of all ranks' buffers are counted in 64 bits.
_MOST_ELEMENTS = 1 << 48


def initialize_ub(  # noqa: PLR0913, pinned
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: _Modes | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    ub_cfgs: Mapping | Sequence[Mapping] | str | os.PathLike | None = None,
    bootstrap_backend: str | None = None,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "tp",
) -> None:
    """Makes the named overlaps of one mesh axis, and the buffers they communicate in.

    Calls and layers with a `ub_name` then run as the overlaps of that name are
    configured, forward and backward, and groups of ranks that lie in several processes
    of a host are connected. All processes of the mesh call it, with the same arguments,
    before they trace what uses it.

    Transformer Engine: `initialize_ub`, by these names; it knows no `mesh` and no
    `axis_name`.

    Args:
        shape: the capacity, `[T, H]`: tokens of all ranks together, with all batch
            axes, and features. Calls may communicate up to T * H elements.
        tp_size: P, the size of `axis_name`.
        use_fp8: the same as `quantization_modes=[FP8]`.
        quantization_modes: for which operands there are overlaps, `NONE`, `FP8` or
            both; None follows `use_fp8`.
        dtype: of the unquantised operands.
        ub_cfgs: by name, what differs from Transformer Engine's defaults; or a list of
            that, one for each mode. `ub.overlap_config.from_te` reads Megatron's files.
            A path: forwards and dgrads are "auto", and "auto" takes the choices of this
            file of `python -m jax_ub tune`, for the sizes that it has.
        bootstrap_backend: how processes find each other: None or "jax", "mpi",
            or "file:<directory>".
        mesh: the mesh; None takes that of `jax.set_mesh`, else groups of `tp_size`
            consecutive devices.
        axis_name: the mesh axis of the ranks. Several axes may be alive at once; those
            whose groups are the same devices share their memory, which the first makes.

    Raises:
        ConfigurationError: if a value, or that of a `JAX_UB_` variable, is out of
            range, or does not fit another.
        ConfigurationTypeError: if a value is of another type.
        UnknownNameError: if a name, a key, a method or a backend is unknown.
        LifecycleError: if the axis is initialised already.
        CommunicatorError: if another process refused, or differs, or there is no memory
            for the buffers, or the directory of a "file" backend cannot be used.
        TimeoutError: if processes were missing when the deadline passed.
    """
    axes = axis_tuple(axis_name)
    domain: Domain | None = None
    place: Place | None = None
    refusal: Exception | None = None
    timeout_s = settings.DEFAULT_TIMEOUT_S
    about: dict[str, str] = {}
    devices = jax.devices()
    try:
        mesh = jax.sharding.get_mesh() if mesh is None else mesh
        devices = _devices_in_reach(mesh)
        check_backend(bootstrap_backend)
        timeout_s = settings.deadline_s()
        settings.check()
        methods.resolve("initialize_ub", None, settings.method())
        _check_not_initialized(axes)
        modes = _read_modes(use_fp8, quantization_modes)
        tp_size = _read_size("tp_size", tp_size)
        mesh = _read_mesh(mesh, axes, tp_size)
        domain = _domain(axes, shape, tp_size, modes, dtype, ub_cfgs, mesh)
        place = _place(axes, domain, devices)
        communicators.check_shared(place)
        about = _about(domain, place)
    except Exception as error:  # The other processes have to learn of any.
        refusal = error
    place = place or _place(axes, domain, devices)
    if place.process not in place.processes:
        raise ConfigurationError(
            f"initialize_ub: none of the mesh's devices belongs to this process, "
            f"{place.process}. Call it on the processes of the mesh only."
        )
    if len(place.processes) > 1:
        agreement = meet(
            bootstrap_backend, place.process, place.processes, timeout_s, refusal
        )
        communicators.connect(place, agreement, about, refusal)
    elif refusal is not None:
        raise refusal
    else:
        communicators.connect_alone(place)
    if domain is not None:
        overlaps.add(domain)


def destroy_ub(axis_name: str | tuple[str, ...] | None = None) -> None:
    """Returns what `initialize_ub` made.

    Programs that were compiled with it and cross processes cannot run any more; trace
    them anew after the next `initialize_ub`.

    Transformer Engine: `destroy_ub`.

    Args:
        axis_name: which axis; None means all of them. One that was not initialised, or
            is destroyed already, is nothing to do.
    """
    wanted = None if axis_name is None else axis_tuple(axis_name)
    for domain in overlaps.domains():
        if wanted in (None, domain.axis_name):
            overlaps.remove(domain.axis_name)
            # Another axis may have groups of the same devices.
            used = {group for other in overlaps.domains() for group in other.groups}
            communicators.disconnect([g for g in domain.groups if g not in used])
    if not overlaps.domains():
        communicators.release_slots()


def is_ub_initialized(axis_name: str | tuple[str, ...] | None = None) -> bool:
    """Says whether `initialize_ub` was called, and `destroy_ub` was not.

    Transformer Engine: none.

    Args:
        axis_name: for which axis; None means any.

    Returns:
        True or False.
    """
    wanted = None if axis_name is None else axis_tuple(axis_name)
    return any(wanted in (None, domain.axis_name) for domain in overlaps.domains())


def get_ub(
    name: str,
    use_fp8: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Overlap:
    """Returns one named overlap, to look at.

    Transformer Engine: `get_ub`.

    Args:
        name: its name, such as "qkv_fprop".
        use_fp8: whether the one for FP8 operands.
        axis_name: its axis; None where only one has the name.

    Returns:
        A `CommOverlapP2P` where the method is "ring_exchange", else a `CommOverlap`.

    Raises:
        LifecycleError: if nothing was initialised.
        ConfigurationTypeError: if `use_fp8` is a quantization mode, or the name is no
            string.
        UnknownOverlapError: if there is no such overlap, or several axes have it; a
            `KeyError` too.
    """
    return overlaps.get(name, use_fp8, axis_tuple(axis_name) or None)


def _devices_in_reach(mesh):
    """Those that the others have too, whatever else is wrong with the call."""
    is_known = isinstance(mesh, Mesh) and not mesh.empty
    return list(mesh.devices.flat) if is_known else jax.devices()


def _check_not_initialized(axes):
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise ConfigurationError(
            f"initialize_ub: axis_name = {axes or None} is not the name of a mesh "
            'axis. Pass that of the ranks, for example axis_name="tp".'
        )
    if len(set(axes)) < len(axes):
        raise ConfigurationError(
            f"initialize_ub: axis_name = {axes} names a mesh axis twice. Name each "
            "once."
        )
    if is_ub_initialized(axes):
        raise LifecycleError(
            f"initialize_ub: axis {axes} is initialised already. Call ub.destroy_ub() "
            "first; another axis name may be initialised beside it."
        )


def _read_modes(use_fp8, modes) -> tuple[UserBufferQuantizationMode, ...]:
    overlaps.check_use_fp8("initialize_ub", use_fp8)
    if modes is not None and not isinstance(modes, list | tuple):
        raise ConfigurationTypeError(
            f"initialize_ub: quantization_modes = {modes!r} is a "
            f"{type(modes).__name__}. Pass a list, such as "
            "[ub.UserBufferQuantizationMode.NONE]."
        )
    if not modes:
        return (overlaps.FP8 if use_fp8 else overlaps.NONE,)
    for mode in modes:
        if not isinstance(mode, UserBufferQuantizationMode):
            raise ConfigurationTypeError(
                f"initialize_ub: quantization_modes has {mode!r}, which is no "
                "ub.UserBufferQuantizationMode. Use its NONE and FP8."
            )
    if len(set(modes)) != len(modes) or (use_fp8 and overlaps.FP8 not in modes):
        raise ConfigurationError(
            f"initialize_ub: quantization_modes = {list(modes)} with use_fp8 = "
            f"{use_fp8}. Name every mode once, and leave use_fp8 out."
        )
    return tuple(modes)


def _domain(axes, shape, tp_size, modes, dtype, ub_cfgs, mesh) -> Domain:
    """Checks everything that one process can check by itself."""
    shape, dtype = _read_shape(shape), _read_dtype(dtype)
    # Kept with the domain in any case: the processes compare them.
    choices = tuned.of_process()
    if isinstance(ub_cfgs, str | os.PathLike):
        choices, ub_cfgs = tuned.read(os.fspath(ub_cfgs)), AUTOMATIC
    found = {}
    for mode, cfgs in zip(modes, _per_mode(ub_cfgs, modes), strict=True):
        entries = read_entries(cfgs)
        for name, config in resolve(entries, tp_size, mode).items():
            found[name, mode] = _overlap(
                name, config, mode, axes, tp_size, shape, dtype, name in entries
            )
    table = rank_groups(mesh, axes, [device.id for device in mesh.devices.flat])
    groups = tuple(map(tuple, table.tolist()))
    owners = rank_groups(
        mesh, axes, [device.process_index for device in mesh.devices.flat]
    )
    return Domain(
        axes,
        tp_size,
        shape,
        dtype,
        modes,
        found,
        groups,
        num_local_ranks=int((owners == jax.process_index()).sum()),
        spans_processes=bool((owners != owners[:, :1]).any()),
        choices=choices,
    )


def _place(axes, domain, devices) -> Place:
    process_of = {device.id: device.process_index for device in devices}
    own = [d for d in devices if d.process_index == jax.process_index()]
    return Place(
        # One group of all where the ranks are not known: nothing will be connected.
        groups=domain.groups if domain is not None else (tuple(process_of),),
        process_of=process_of,
        process=jax.process_index(),
        platform=cuda.platform_of(devices[0]),
        capacity=domain.capacity if domain is not None else 0,
        num_slots=domain.num_slots if domain is not None else 0,
        name=f"initialize_ub(axis_name={axes!r})",
        ordinals=cuda.ordinals(list(filter(cuda.is_cuda, own))),
    )


def _about(domain: Domain, place: Place) -> dict[str, str]:
    """What all processes must have in common."""
    return {
        "axis_name": str(domain.axis_name),
        "the version of jax_ub": tuned.version_of("jax_ub"),
        "the version of jax": jax.__version__,
        "JAX_UB_METHOD": str(settings.method()),
        "JAX_UB_ALLOW_TF32": str(settings.allow_tf32()),
        "JAX_UB_NVLS": str(settings.nvls()),
        "shape": str(domain.shape),
        "tp_size": str(domain.tp_size),
        "dtype": str(domain.dtype),
        "quantization_modes": str([mode.name for mode in domain.modes]),
        "the tuned choices": domain.choices.digest if domain.choices else "none",
        "the devices of the ranks": str(domain.groups),
        "the groups that are connected already": communicators.shared_groups(place),
        **{
            f"ub_cfgs[{name!r}][{key!r}] for {mode.name}": str(value)
            for (name, mode), overlap in domain.overlaps.items()
            for key, value in overlap.config.items()
        },
    }


def _read_shape(shape):
    if not isinstance(shape, Sequence | np.ndarray) or len(shape) != 2:
        raise ConfigurationError(
            f"initialize_ub: shape = {shape!r} is not [T, H], the tokens of all ranks "
            "together and their features."
        )
    sizes = _read_size("shape[0]", shape[0]), _read_size("shape[1]", shape[1])
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise ConfigurationError(
            f"initialize_ub: shape = {sizes} is more than any memory holds. Pass the "
            "tokens of all ranks together, and their features."
        )
    return sizes


def _read_size(name, value):
    if not shapes.is_integer(value):
        raise ConfigurationTypeError(
            f"initialize_ub: {name} = {value!r} is a {type(value).__name__}, not an "
            "integer. Pass 1 or more."
        )
    if value < 1:
        raise ConfigurationError(
            f"initialize_ub: {name} = {value} is not positive. Pass 1 or more."
        )
    return int(value)


def _read_dtype(dtype):
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in shapes.FLOATS:
        raise ConfigurationError(
            f"initialize_ub: dtype = {dtype!r} is none of float32, bfloat16 and "
            "float16. FP8 buffers are a quantization mode: quantization_modes=[FP8]."
        )
    return found


def _read_mesh(mesh, axes, tp_size) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise ConfigurationTypeError(
            f"initialize_ub: mesh = {mesh!r} is a {type(mesh).__name__}, but the "
            "devices must be known. Pass a jax.sharding.Mesh."
        )
    if mesh.empty:
        return _consecutive(axes, tp_size)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ConfigurationError(
            f"initialize_ub: the mesh has the axes {tuple(mesh.axis_names)}, not "
            f"{missing[0]!r}. Pass the one of the ranks as axis_name=."
        )
    size = math.prod(mesh.shape[axis] for axis in axes)
    if size != tp_size:
        raise ConfigurationError(
            f"initialize_ub: tp_size = {tp_size}, but axis {axes} of the mesh has "
            f"{size} devices. Pass tp_size={size}, or a mesh with {tp_size} there."
        )
    return mesh


def _consecutive(axes, tp_size):
    devices = jax.devices()
    if len(devices) < tp_size:
        raise ConfigurationError(
            f"initialize_ub: tp_size = {tp_size}, but jax has {len(devices)} devices. "
            f"Pass at most {len(devices)}, or start jax with more; on CPUs "
            f'jax.config.update("jax_num_cpu_devices", {tp_size}) before its first use.'
        )
    if len(axes) > 1 or len(devices) % tp_size:
        raise ConfigurationError(
            f"initialize_ub: {len(devices)} devices do not make groups of tp_size = "
            f"{tp_size} on {axes}. Pass mesh=, which says how they lie."
        )
    groups = np.array(devices).reshape(-1, tp_size)
    return Mesh(groups, (f"replicas of {axes[0]}", *axes))


def _per_mode(ub_cfgs, modes):
    if ub_cfgs is None or isinstance(ub_cfgs, Mapping):
        return [ub_cfgs] * len(modes)
    if not isinstance(ub_cfgs, list | tuple):
        raise ConfigurationTypeError(
            f"initialize_ub: ub_cfgs = {ub_cfgs!r} is a {type(ub_cfgs).__name__}. Pass "
            "a dictionary of names, or a list with one for each quantization mode."
        )
    if len(ub_cfgs) != len(modes):
        raise ConfigurationError(
            f"initialize_ub: ub_cfgs has {len(ub_cfgs)} dictionaries for {len(modes)} "
            "quantization modes. Pass one for each, or a single one for all."
        )
    return ub_cfgs


def _overlap(
    name: str,
    config: OverlapConfig,
    mode: UserBufferQuantizationMode,
    axes: tuple[str, ...],
    tp_size: int,
    shape: tuple[int, int],
    dtype: np.dtype,
    is_configured: bool,
) -> Overlap:
    is_ring = config.method == Method.RING_EXCHANGE.value
    rows = shape[0]
    if is_ring and config.comm_type is CommOverlapType.RS:
        # Every rank keeps its own products, and what the others send of its rows.
        rows = -(-rows * (2 * tp_size - 1) // tp_size)
    is_fp8 = mode is overlaps.FP8 and config.fp8_buf
    return (CommOverlapP2P if is_ring else CommOverlap)(
        name=name,
        method=config.method,
        comm_type=config.comm_type,
        config=config,
        buffer_shape=(rows, shape[1]),
        buffer_dtype=jnp.dtype(jnp.uint8) if is_fp8 else dtype,
        mode=mode,
        axis_name=axes,
        tp_size=tp_size,
        is_configured=is_configured,
    )
