"""Where a linear layer's arrays lie on a mesh, and the layer run in that layout.

A layer is called in one of two places. Inside the caller's own `jax.shard_map` its
arrays are one rank's shards already, and `ub.linear` is called as it is. On global
arrays it makes the `shard_map` itself:

| parallel | x | kernel | bias | y |
|---|---|---|---|---|
| "column" | `[data, tp, -]` | `[-, tp]` | `[tp]` | `[data, -, tp]` |
| "row" | `[data, -, tp]` | `[tp, -]` | `[-]` | `[data, tp, -]` |
| None | `[data, tp, -]` | `[-, -]` | `[-]` | `[data, tp, -]` |

`data` stands for the data axes, and is left out where they do not divide the leading
axis. Without sequence parallelism no token axis is sharded over `tp`. Where x is
`[tokens, features]`, its tokens lie over `(data..., tp)`.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ub.errors import ShapeContractError, UnknownNameError, nearest
from jax_ub.rules.all_gather_matmul import all_gather_matmul
from jax_ub.rules.linear import linear
from jax_ub.rules.matmul_all_reduce import matmul_all_reduce
from jax_ub.rules.matmul_reduce_scatter import matmul_reduce_scatter

KINDS = ("column", "row")
_ALIASES = {"ag": "column", "rs": "row"}


def resolve_kind(op: str, kind: str | None) -> str:
    """Returns "column" or "row" for a kind or its alias ("ag", "rs").

    Raises:
        UnknownNameError: if there is no such kind.
    """
    resolved = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if resolved not in KINDS:
        raise UnknownNameError(
            f"{op}: {kind!r} is not a way to shard a kernel. "
            f"{nearest(str(kind), (*KINDS, *_ALIASES))}"
        )
    return resolved


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one linear layer is spread over a mesh; hashable over every field.

    Attributes:
        parallel: "column" (the kernel's out dimension is sharded), "row" (its in
            dimension) or None (neither).
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        data_axes: the mesh axes that shard the leading axis of the activations. None
            takes all axes but `axis_name`, where their product divides it.
        sequence_parallel: whether tokens are sharded over `axis_name` where features
            are not.
    """

    parallel: str | None
    axis_name: str = "tp"
    mesh: Mesh | AbstractMesh | None = None
    data_axes: tuple[str, ...] | None = None
    sequence_parallel: bool = True

    @property
    def op(self) -> str:
        """The layer's name in errors."""
        return f"linear(parallel={self.parallel!r})"

    @property
    def sharded_dim(self) -> int | None:
        """The kernel's sharded dimension: 0 (in), 1 (out) or None."""
        return {"column": 1, "row": 0, None: None}[self.parallel]

    @property
    def kernel_spec(self) -> P:
        """The layout of the kernel [in, out]."""
        return P(*(self.axis_name if d == self.sharded_dim else None for d in (0, 1)))

    @property
    def bias_spec(self) -> P:
        """The layout of the bias [out]."""
        return P(self.axis_name if self.parallel == "column" else None)

    def is_local(self) -> bool:
        """Whether the arrays at hand are one rank's: the axis is manual here."""
        return self.axis_name in jax.sharding.get_abstract_mesh().manual_axes

    def find_mesh(self, *arrays) -> Mesh | AbstractMesh | None:
        """Finds the mesh of a call on global arrays, None where none is known.

        A mesh whose axes are manual in part wins: it is the caller's `shard_map`. Then
        the argument, the mesh of `jax.set_mesh`, and that of the first array with one.
        """
        context = jax.sharding.get_abstract_mesh()
        if context.manual_axes or (self.mesh is None and not context.empty):
            return context
        if self.mesh is not None:
            return self.mesh
        for array in arrays:
            # A concrete array knows its devices; a traced one only their layout.
            concrete = isinstance(array, jax.Array) and not isinstance(
                array, jax.core.Tracer
            )
            sharding = array.sharding if concrete else jax.typeof(array).sharding
            if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
                return sharding.mesh
        return None

    def axis_size(self, mesh: Mesh | AbstractMesh) -> int:
        """Returns the number of ranks on the tensor-parallel axis of `mesh`.

        Raises:
            UnknownNameError: if the mesh has no such axis.
        """
        if self.axis_name not in mesh.shape:
            raise UnknownNameError(
                f"{self.op}: axis_name = {self.axis_name!r} is not an axis of the mesh "
                f"{dict(mesh.shape)}. {nearest(self.axis_name, mesh.axis_names)}"
            )
        return mesh.shape[self.axis_name]

    def check_features(self, kernel_shape: Sequence[int], num_ranks: int) -> None:
        """Refuses a global kernel [in, out] whose sharded dimension does not divide."""
        dim = self.sharded_dim
        if dim is None or kernel_shape[dim] % num_ranks == 0:
            return
        name = ("in_features", "out_features")[dim]
        padded = math.ceil(kernel_shape[dim] / num_ranks) * num_ranks
        raise ShapeContractError(
            f"{self.op}: {name} = {kernel_shape[dim]} does not divide into the "
            f"{num_ranks} ranks of mesh axis {self.axis_name!r}. Use {padded}, or "
            "parallel=None."
        )

    def check_kernel_spec(self, spec: Sequence | None, num_in: int = 1) -> None:
        """Refuses a kernel that is sharded on the tp axis along its other dimensions.

        Args:
            spec: the layout of the kernel `[in..., out...]`, None where unknown.
            num_in: how many of its dimensions are contracted.
        """
        found = kind_of_spec(spec, num_in, self.axis_name)
        if found is None or self.parallel in (None, found):
            return
        raise ShapeContractError(
            f"{self.op}: the kernel is sharded {P(*spec)}, along its "
            f"{_SHARDED[found]} dimension, but {self.parallel!r} wants its "
            f"{_SHARDED[self.parallel]} dimension on {self.axis_name!r}. Shard it "
            f"{self.kernel_spec}, or use {found!r}."
        )


_SHARDED = {"column": "out", "row": "in"}


def kind_of_spec(spec: Sequence | None, num_in: int, axis_name: str) -> str | None:
    """Returns "column", "row" or None by the dimension of a kernel that is sharded.

    Args:
        spec: the layout of the kernel `[in..., out...]`; None where it is unknown.
        num_in: how many of its dimensions are contracted.
        axis_name: the tensor-parallel mesh axis.
    """
    for dim, entry in enumerate(spec or ()):
        if axis_name in (entry if isinstance(entry, tuple) else (entry,)):
            return "row" if dim < num_in else "column"
    return None


def place(array: jax.Array | None, mesh: Mesh | AbstractMesh, spec: P):
    """Moves `array` into `spec` where its mesh axes are explicit.

    `shard_map` moves its operands by itself over automatic axes, and refuses operands
    that lie otherwise over explicit ones.
    """
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if not explicit or array is None:
        return array
    kept = [
        tuple(a for a in (e if isinstance(e, tuple) else (e,)) if a in explicit) or None
        for e in spec
    ]
    return jax.sharding.reshard(array, NamedSharding(mesh, P(*kept)))


def run(placement: Placement, x, kernel, bias=None, main_grad=None, **options):
    """Multiplies x [..., K] by kernel [K, N] in the layout of `placement`.

    Args:
        placement: the layout.
        x: activations, `[..., tokens, K]`; a vector `[K]` counts as one token.
        kernel: `[K, N]`; global, or the rank's shard where the axis is manual.
        bias: `[N]` or None, laid out as `placement.bias_spec`.
        main_grad: f32 `[K, N]` or None, laid out as the kernel.
        **options: `method`, `ub_name` and `out_dtype` of the public functions.

    Returns:
        `[..., tokens, N]`.
    """
    if x.ndim == 1:
        return run(placement, x[None], kernel, bias, main_grad, **options)[0]
    mesh = None if placement.is_local() else placement.find_mesh(kernel, x)
    if mesh is None:
        if placement.parallel is not None and not placement.is_local():
            raise ShapeContractError(
                f"{placement.op}: no mesh is known here: none was given, none is set, "
                "and the kernel lies on one device. Call it under jax.set_mesh(mesh), "
                "pass mesh=, or call it inside jax.shard_map over "
                f"{placement.axis_name!r}."
            )
        return _multiply(placement, x, kernel, bias, main_grad, **options)
    placement.check_features(kernel.shape, placement.axis_size(mesh))
    placement.check_kernel_spec(jax.typeof(kernel).sharding.spec)
    reason = why_uneven(placement, mesh, x.shape)
    if reason is not None:
        raise ShapeContractError(f"{placement.op}: {reason}")
    return _run_global(placement, mesh, (x, kernel, bias, main_grad), options)


def _multiply(placement, x, kernel, bias, main_grad, *, out_dtype=None, **options):
    """Runs the layer on this rank's shards."""
    parallel, is_sequence = placement.parallel, placement.sequence_parallel
    options |= {"main_grad": main_grad}
    fused = _WITH_OUT_DTYPE.get((parallel, is_sequence))
    if out_dtype is not None and fused is not None:
        options |= {"axis_name": placement.axis_name, "out_dtype": out_dtype}
        return fused(x, kernel, bias=bias, **options)
    options |= {"parallel": parallel, "sequence_parallel": is_sequence}
    if parallel is not None:
        options |= {"axis_name": placement.axis_name}
    y = linear(x, kernel, bias, **options)
    return y if out_dtype is None else y.astype(out_dtype)


# What `linear` calls, where that rounds once to the dtype that is asked for.
_WITH_OUT_DTYPE = {
    ("column", True): all_gather_matmul,
    ("row", True): matmul_reduce_scatter,
    ("row", False): matmul_all_reduce,
}


def why_uneven(placement: Placement, mesh, x_shape: Sequence[int]) -> str | None:
    """Says why x [..., tokens, K] cannot be cut as `placement` asks, None if it can."""
    data_axes = _data_axes(placement, mesh, x_shape)
    num_data = math.prod(mesh.shape[name] for name in data_axes)
    num_tp = mesh.shape[placement.axis_name] if placement.sequence_parallel else 1
    num_parts = num_tp * num_data if len(x_shape) == 2 else num_tp
    if x_shape[-2] % num_parts:
        padded = math.ceil(x_shape[-2] / num_parts) * num_parts
        return (
            f"x {tuple(x_shape)} has {x_shape[-2]} tokens (axis -2), which do not "
            f"divide into {num_parts} ranks. Pad to {padded} tokens, or use "
            "sequence_parallel=False."
        )
    if len(x_shape) > 2 and x_shape[0] % num_data:
        return (
            f"x {tuple(x_shape)} has a leading axis of {x_shape[0]}, which does not "
            f"divide into the {num_data} ranks of data_axes = {data_axes}. Pass other "
            "data_axes, or data_axes=()."
        )
    return None


def _run_global(placement, mesh, operands, options):
    """Runs the layer in a `shard_map` over every axis that is not manual yet."""
    x = operands[0]
    data_axes = _data_axes(placement, mesh, x.shape)
    x_spec, y_spec = _activation_specs(placement, data_axes, x.ndim)
    specs = (x_spec, placement.kernel_spec, placement.bias_spec, placement.kernel_spec)
    # The axes whose ranks hold other tokens for the same part of the kernel.
    replicas = data_axes
    if placement.parallel is None and placement.sequence_parallel:
        replicas += (placement.axis_name,)

    def local(x, kernel, bias, main_grad):
        if main_grad is not None and replicas:
            main_grad = _on_first_replica(main_grad, replicas)
        return _multiply(placement, x, kernel, bias, main_grad, **options)

    context = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        local,
        mesh=None if mesh is context else mesh,
        in_specs=specs,
        out_specs=y_spec,
        axis_names=set(mesh.axis_names) - set(context.manual_axes),
    )(*(place(o, mesh, spec) for o, spec in zip(operands, specs, strict=True)))


def _data_axes(placement, mesh, x_shape):
    """Returns the axes of more than one rank that shard the leading axis of x."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    chosen = placement.data_axes
    names = mesh.axis_names if chosen is None else chosen
    for name in names:
        if name not in mesh.shape:
            raise UnknownNameError(
                f"{placement.op}: data_axes has {name!r}, which is not an axis of the "
                f"mesh {dict(mesh.shape)}. {nearest(name, mesh.axis_names)}"
            )
    axes = tuple(
        name
        for name in names
        if name != placement.axis_name and name not in manual and mesh.shape[name] > 1
    )
    if chosen is not None:
        return axes
    # The tokens of [tokens, features] are shared with the tensor-parallel ranks.
    shares = len(x_shape) == 2 and placement.sequence_parallel
    num_tp = mesh.shape[placement.axis_name] if shares else 1
    num_data = math.prod(mesh.shape[name] for name in axes)
    return axes if x_shape[0] % (num_data * num_tp) == 0 else ()


def _activation_specs(placement, data_axes, ndim):
    """Returns the layouts of x and y, both [..., tokens, features]."""
    lead = [data_axes or None, *[None] * (ndim - 3)] if ndim > 2 else []
    tokens = data_axes if ndim == 2 else ()
    shared = (*tokens, placement.axis_name) if placement.sequence_parallel else tokens
    by_feature = P(*lead, tokens or None, placement.axis_name)
    by_token = P(*lead, shared or None, None)
    if placement.parallel == "column":
        return by_token, by_feature
    if placement.parallel == "row":
        return by_feature, by_token
    return by_token, by_token


def _on_first_replica(main_grad, axes):
    """Leaves `main_grad` with the first replica and zeros with the others.

    Every replica accumulates into its own, and the replicas' results are summed, since
    main_grad went in replicated: it must be in that sum once.
    """
    first = jnp.array(True)
    for axis_name in axes:
        first &= jax.lax.axis_index(axis_name) == 0
    others = jax.lax.stop_gradient(jnp.where(first, 0, main_grad))
    # A difference, not a choice, so that every replica's cotangent gets through.
    return main_grad - others
