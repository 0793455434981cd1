"""`initialize_ub` and `destroy_ub` create and free named overlaps and their buffers.

Transformer Engine: `module.base.initialize_ub`. All arguments are checked before any
resource is created, and all processes agree on the outcome. So a failed call leaves no
resources behind in any process.
"""

import os
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_ub._src import methods
from jax_ub._src.checks import axis_tuple, check_axis_name
from jax_ub._src.config.overlap_config import UserBufferQuantizationMode
from jax_ub._src.errors import ConfigurationError, LifecycleError, shown
from jax_ub._src.output import version_of
from jax_ub._src.runtime import (
    communicators,
    connection_attempt,
    cpu_engine,
    registry,
    settings,
)
from jax_ub._src.runtime.bootstrap import (
    check_backend,
    join_job,
    open_rendezvous,
    publish_pid,
)
from jax_ub._src.runtime.initialize_args import (
    make_initialized_axis,
    read_dtype,
    read_mesh,
    read_modes,
    read_shape,
    read_size,
)
from jax_ub._src.runtime.registry import InitializedAxis, Overlap


def initialize_ub(  # noqa: PLR0913, pinned
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    ub_cfgs: Mapping | Sequence[Mapping] | str | os.PathLike | None = None,
    bootstrap_backend: str | None = None,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "tp",
) -> None:
    """Creates the named overlaps and the communication buffers of a mesh axis.

    Afterwards, calls and layers with a `ub_name` run as the overlaps of that name are
    configured, in the forward and the backward pass. Groups of ranks that span several
    processes of a host are connected. All processes of the mesh must call it, with the
    same arguments, before they trace functions that use the overlaps.

    Transformer Engine: `initialize_ub`, with the same argument names; `mesh` and
    `axis_name` are additions.

    Args:
        shape: the capacity, `[T, H]`: the number of tokens of all ranks together,
            including all batch axes, and the number of features. A call may communicate
            up to T * H elements.
        tp_size: P, the size of `axis_name`.
        use_fp8: the same as `quantization_modes=[FP8]`.
        quantization_modes: the quantization modes for which to create overlaps: `NONE`,
            `FP8` or both. Layers with FP8 operands use those of `FP8`. None follows
            `use_fp8`.
        dtype: the dtype of unquantized operands, by which `get_ub` and `memory_report`
            show the size of each name. The buffers fit calls of every dtype.
        ub_cfgs: a dictionary from overlap names to the settings that differ from
            Transformer Engine's defaults, or a list with one such dictionary per mode.
            `ub.overlap_config.from_te` reads Megatron's files. Alternatively the path
            of a file of `python -m jax_ub tune`: the forward pass and dgrad then use
            "auto", which follows the file for the sizes that it contains.
        bootstrap_backend: how the processes find each other: None or "jax", the service
            of `jax.distributed.initialize()`, which the program has called. With "mpi",
            `initialize_ub` makes that call if the program has not, and JAX finds the
            processes by mpi4py.
        mesh: the mesh. None means the mesh of `jax.set_mesh`; if there is none, groups
            of `tp_size` consecutive devices.
        axis_name: the mesh axis of the ranks. Several axes may be initialized at the
            same time. Axes whose groups have the same devices share the memory that the
            first of them has allocated.

    Raises:
        ConfigurationError: if an argument or a `JAX_UB_` variable is out of range, or
            contradicts another one.
        ConfigurationTypeError: if an argument has the wrong type.
        ShapeContractError: if `axis_name` is not a name or a tuple of names.
        UnknownNameError: if a name, a key, a method or a backend is unknown.
        LifecycleError: if the axis is initialized already.
        CommunicatorError: if another process failed or has different arguments, or if
            there is not enough memory for the buffers.
        TimeoutError: if processes did not arrive before the deadline.
    """
    with registry.CHANGING:
        join_job(bootstrap_backend)
        mesh = jax.sharding.get_mesh() if mesh is None else mesh
        processes = _processes_of(mesh)
        before = registry.axes()
        try:
            with open_rendezvous(processes, _timeout_s()) as all_gather:
                try:
                    publish_pid()
                    check_backend(bootstrap_backend)
                    modes = use_fp8, quantization_modes
                    axis = _prepare(
                        shape, tp_size, *modes, dtype, ub_cfgs, mesh, axis_name
                    )
                    agreed = _agreed_settings(bootstrap_backend, axis)
                except Exception as error:
                    all_gather.gather(None, error)  # raises the error in all processes
                    raise
                connection_attempt.connect(axis.device_groups, all_gather, agreed)
            registry.add(axis)
        except BaseException:  # also KeyboardInterrupt
            _keep_only(before)
            raise


def destroy_ub(axis_name: str | tuple[str, ...] | None = None) -> None:
    """Undoes `initialize_ub`: removes overlaps, closes connections, frees buffers.

    Waits for the programs that this process has launched, because peers in other
    processes take part in them; at most as long as `initialize_ub` waits for a process.
    Multi-process programs that were compiled before cannot run any more. Trace them
    again after the next `initialize_ub`.

    Transformer Engine: `destroy_ub`.

    Args:
        axis_name: the mesh axis to remove; None means all axes. Axes that are not
            initialized are ignored.

    Raises:
        ShapeContractError: if `axis_name` is not a name or a tuple of names.
    """
    wanted = _axes("destroy_ub", axis_name)
    with registry.CHANGING:
        kept = [d for d in registry.axes() if wanted not in (None, d.axis_name)]
        communicators.finish_launches(_keys_of(kept))
        _keep_only(kept)
        if not kept:
            communicators.release_slots()


def is_ub_initialized(axis_name: str | tuple[str, ...] | None = None) -> bool:
    """Returns whether `initialize_ub` has set up a mesh axis.

    Transformer Engine: none.

    Args:
        axis_name: the mesh axis; None means any axis.

    Returns:
        True if the axis, or any axis, is initialized.

    Raises:
        ShapeContractError: if `axis_name` is not a name or a tuple of names.
    """
    wanted = _axes("is_ub_initialized", axis_name)
    return any(wanted in (None, axis.axis_name) for axis in registry.axes())


def get_ub(
    name: str,
    use_fp8: bool = False,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Overlap:
    """Returns the settings and the buffer size of an overlap, such as "qkv_fprop".

    Transformer Engine: `get_ub`.

    Args:
        name: the overlap's name, such as "qkv_fprop".
        use_fp8: whether to return the overlap of FP8 operands.
        axis_name: the mesh axis. It may be None if only one axis has the name.

    Returns:
        A `CommOverlapP2P` if the method is "ring_exchange", else a `CommOverlap`.

    Raises:
        ShapeContractError: if `axis_name` is not a name or a tuple of names.
        LifecycleError: if no axis is initialized.
        ConfigurationTypeError: if `use_fp8` is not a bool, or the name is not a string.
        UnknownOverlapError: if no overlap has this name, or several axes have one. It
            is a subclass of `KeyError`.
    """
    return registry.get(name, use_fp8, _axes("get_ub", axis_name))


def _axes(op, axis_name):
    """Converts the argument `axis_name` to a tuple of mesh axes. None stays None."""
    if axis_name is None:
        return None
    check_axis_name(op, axis_name)
    return axis_tuple(axis_name)


def _prepare(
    shape, tp_size, use_fp8, modes, dtype, ub_cfgs, mesh, axis_name
) -> InitializedAxis:
    """Checks the arguments of `initialize_ub`. Allocates nothing."""
    axes = axis_tuple(axis_name)
    settings.check()
    methods.resolve("initialize_ub", None, settings.method())
    check_axis_name("initialize_ub", axis_name)
    _check_not_initialized(axes)
    modes = read_modes(use_fp8, modes)
    tp_size = read_size("tp_size", tp_size)
    mesh = read_mesh(mesh, axes, tp_size)
    capacity, dtype = read_shape(shape), read_dtype(dtype)
    axis = make_initialized_axis(axes, tp_size, capacity, dtype, modes, ub_cfgs, mesh)
    communicators.check_shared(axis.device_groups)
    return axis


def _keep_only(kept):
    """Keeps only the axes in `kept`: closes all other connections, removes other axes.

    In this order, the call can be repeated after an interrupt.
    """
    communicators.disconnect_all_but(_keys_of(kept))
    for axis in registry.axes():
        if axis not in kept:
            registry.remove(axis.axis_name)


def _keys_of(axes):
    """Returns the set of keys of all groups of ranks along the given axes."""
    return {key for axis in axes for key in axis.device_groups.keys}


def _processes_of(mesh) -> list[int]:
    """Returns the indices of the processes that must call `initialize_ub`.

    These are the processes of the mesh, or all processes of the job if the mesh is not
    usable. Every process must find the same processes, even if only its own arguments
    are invalid, since they exchange the error.
    """
    is_known = isinstance(mesh, Mesh) and not mesh.empty
    devices = mesh.devices.flat if is_known else jax.devices()
    processes = sorted({device.process_index for device in devices})
    if jax.process_index() not in processes:
        raise ConfigurationError(
            f"initialize_ub: the mesh has no device of this process, "
            f"{jax.process_index()}. Call it in the processes of the mesh only."
        )
    return processes


def _timeout_s():
    try:
        return settings.timeout_s()
    except ConfigurationError:  # `settings.check` raises it in all processes
        return settings.DEFAULT_TIMEOUT_S


def _check_not_initialized(axes):
    if is_ub_initialized(axes):
        raise LifecycleError(
            f"initialize_ub: axis {shown(axes)} is already initialized. Call "
            "ub.destroy_ub() first, or pass another axis name."
        )


def _agreed_settings(backend: str | None, axis: InitializedAxis) -> dict[str, str]:
    """Returns the settings that must be equal in all processes, by name."""
    return {
        "axis_name": shown(axis.axis_name),
        "bootstrap_backend": backend or "jax",
        "the version of jax_ub": version_of("jax_ub"),
        "the version of jax": jax.__version__,
        "the engine of jax_ub": cpu_engine.why_not() or "built",
        "JAX_UB_METHOD": str(settings.method()),
        "JAX_UB_ALLOW_TF32": str(settings.allow_tf32()),
        "JAX_UB_NVLS": str(settings.nvls()),
        "shape": str(axis.shape),
        "tp_size": str(axis.tp_size),
        "dtype": str(axis.dtype),
        "quantization_modes": str([mode.name for mode in axis.modes]),
        "the tuned choices": axis.choices.digest if axis.choices else "none",
        "the devices of the ranks": str(axis.device_groups.groups),
        "the groups that are connected already": communicators.shared_groups(
            axis.device_groups
        ),
        **{
            f"ub_cfgs[{shown(name)}][{shown(key)}] for {mode.name}": str(value)
            for (name, mode), overlap in axis.overlaps.items()
            for key, value in overlap.config.items()
        },
    }
