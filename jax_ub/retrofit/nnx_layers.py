"""The `flax.nnx` layers whose GEMM `ub.overlap` can overlap."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ub.errors import shown
from jax_ub.retrofit import interception
from jax_ub.retrofit.dot_general import DotGeneral
from jax_ub.retrofit.einsum import Einsum, Equation
from jax_ub.retrofit.sharding_layout import sharded_dim, sharding_of
from jax_ub.shapes import axis_tuple


class Layer(abc.ABC):
    """An nnx module with one kernel, and the function that multiplies by the kernel.

    Attributes:
        node: the module.
        kernel: the kernel's variable, or the object that another library, such as one
            for quantization, has replaced it with.
    """

    function = "jax.lax.dot_general"
    described = "a dot_general"

    def __init__(self, node: Any, kernel: Any):
        """Stores the module and its kernel."""
        self.node = node
        self.kernel = kernel

    @property
    @abc.abstractmethod
    def op(self) -> Any:
        """The function that the module uses to multiply now."""

    @property
    @abc.abstractmethod
    def originals(self) -> tuple[Any, ...]:
        """The functions that Flax uses by default."""

    @property
    @abc.abstractmethod
    def num_in(self) -> int:
        """The number of contracted dimensions of the kernel."""

    @abc.abstractmethod
    def in_out(self, dims: Sequence) -> tuple:
        """Reorders a sequence with one item per kernel dimension to [*in, *out]."""

    @abc.abstractmethod
    def replace(self, dense: DotGeneral) -> None:
        """Makes the module multiply by `dense`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of one layer's kernel, without axes of stacked layers."""
        return tuple(getattr(self.kernel, "shape", ()))[-self.num_dims :]

    @property
    @abc.abstractmethod
    def num_dims(self) -> int:
        """The number of dimensions of one layer's kernel."""

    @property
    def spec(self) -> tuple:
        """The kernel's partition spec as [*in, *out], from its array or metadata."""
        spec = spec_of(self.kernel)[-self.num_dims :]
        return self.in_out((*spec, *[None] * (self.num_dims - len(spec))))

    @property
    def mesh(self) -> Mesh | None:
        """The concrete mesh of the kernel; None if its sharding has no such mesh."""
        return next(map(mesh_of, _arrays_of(self.kernel)), None)

    @property
    def replaced(self) -> Any:
        """The function that the module used before `overlap` replaced it."""
        op = self.op
        return op.original if isinstance(op, DotGeneral | Einsum) else op

    def why_kept(self) -> tuple[str, str] | None:
        """Returns why `overlap` must not replace the function, and a fix; or None.

        A layer keeps a function that neither Flax nor `overlap` has set, such as that
        of a quantized layer.
        """
        op = self.op
        is_known = op is None or any(op is known for known in self.originals)
        if is_known or isinstance(op, DotGeneral | Einsum):
            return None
        return (
            f"has {self.described} of its own, {op}",
            f"Set it to {self.function} first",
        )


class LinearLayer(Layer):
    """`nnx.Linear` or `nnx.LinearGeneral`, which multiply by a `dot_general`."""

    def __init__(self, node: Any):
        """Stores the module."""
        super().__init__(node, node.kernel)

    @property
    def op(self):
        """The module's `dot_general`."""
        return self.node.dot_general

    @property
    def originals(self):
        """`jax.lax.dot_general`."""
        return (interception.DOT_GENERAL.function,)

    @property
    def num_in(self):
        """The length of the module's `in_features`; 1 for an integer."""
        return _count(self.node.in_features)

    @property
    def num_dims(self):
        """The number of in dimensions plus out dimensions."""
        return self.num_in + _count(self.node.out_features)

    def in_out(self, dims):
        """Keeps the order: the kernel is stored as [*in, *out]."""
        return tuple(dims)

    def replace(self, dense):
        """Sets the module's `dot_general`."""
        self.node.dot_general = dense


class EinsumLayer(Layer):
    """`nnx.Einsum`, which multiplies by an `einsum_op`."""

    function = "jax.numpy.einsum"
    described = "an einsum_op"

    def __init__(self, node: Any):
        """Stores the module, and parses its equation."""
        super().__init__(node, node.kernel)
        equation = None if node.einsum_str is None else Equation.read(node.einsum_str)
        self.equation = equation if equation and equation.is_dense else None

    @property
    def op(self):
        """The module's `einsum_op`."""
        return self.node.einsum_op

    @property
    def originals(self):
        """`jax.numpy.einsum`."""
        return (interception.EINSUM.function,)

    @property
    def num_in(self):
        """The number of contracted labels; 0 if the equation is not a dense layer's."""
        return 0 if self.equation is None else len(self.equation.ins)

    @property
    def num_dims(self):
        """The number of dimensions of the module's `kernel_shape`."""
        return len(self.node.kernel_shape)

    def in_out(self, dims):
        """Reorders by the labels of the equation."""
        if self.equation is None:
            return tuple(dims)
        found = dict(zip(self.equation.kernel, dims, strict=True))
        return tuple(found[label] for label in self.equation.ins + self.equation.outs)

    def replace(self, dense):
        """Sets the module's `einsum_op`."""
        label, dim = "", sharded_dim(self.spec, dense.sharding_layout.axis_name)
        if self.equation is not None and dim is not None:
            label = (self.equation.ins + self.equation.outs)[dim]
        self.node.einsum_op = Einsum(_held_by_jax(dense), label, self.replaced)

    def why_kept(self):
        """Returns why the function is kept; einsums that are not dense keep it, too."""
        kept = super().why_kept()
        if kept is not None or self.equation is not None:
            return kept
        text = shown(self.node.einsum_str)
        return (
            f"has einsum_str = {text}, which is no dense layer's",
            "Write one with each label in two of x, kernel and result",
        )


class AttendLayer(Layer):
    """`nnx.Embed`, whose `attend` multiplies by the transposed embedding."""

    num_in = 1
    num_dims = 2

    def __init__(self, node: Any):
        """Stores the module."""
        super().__init__(node, node.embedding)

    @property
    def op(self):
        """The product function of an `OverlappedEmbed`; None for `nnx.Embed`."""
        return getattr(self.node, "attend_dot_general", None)

    @property
    def originals(self):
        """Empty: `nnx.Embed` has no attribute for the function."""
        return ()

    def in_out(self, dims):
        """Reverses the order: the embedding is stored as [out, in]."""
        return tuple(dims)[::-1]

    def replace(self, dense):
        """Changes the module's class to `OverlappedEmbed`."""
        self.node.__class__ = OverlappedEmbed
        self.node.attend_dot_general = _held_by_jax(dense)


class OverlappedEmbed(nnx.Embed):
    """`nnx.Embed` with an overlapped `attend`.

    `ub.overlap` changes the class of an existing `nnx.Embed` to this one.
    """

    attend_dot_general: DotGeneral

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies `[..., tokens, features]` by the transposed embedding."""
        dense = self.attend_dot_general
        reason = dense.why_intercepted(interception.DOT, None)
        if reason is not None:
            given = {} if out_sharding is None else {"out_sharding": out_sharding}
            with dense.falling_back(reason):
                return super().attend(query, **given)
        operands = (query, self.embedding[...])
        query, embedding = self.promote_dtype(operands, dtype=self.dtype)
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        return dense(query, embedding, dims, out_sharding=out_sharding)


def layers_of(model: Any) -> Iterator[tuple[str, Layer]]:
    """Yields path and `Layer` of every module whose GEMM can be overlapped."""
    for path, node in nnx.iter_graph(model):
        name = ".".join(p if isinstance(p, str) else shown(p) for p in path)
        if isinstance(node, nnx.Einsum):
            yield name, EinsumLayer(node)
        elif isinstance(node, nnx.Linear) or (
            # With dot_general_cls the layer ignores its dot_general, and a layer with
            # batch axes is not a dense layer.
            isinstance(node, nnx.LinearGeneral)
            and node.dot_general_cls is None
            and not node.batch_axis
        ):
            yield name, LinearLayer(node)
        elif type(node) in (nnx.Embed, OverlappedEmbed):
            yield f"{name}.attend" if name else "attend", AttendLayer(node)


def spec_of(variable: Any) -> tuple:
    """Returns the partition spec of a variable, from its array or its metadata."""
    for array in _arrays_of(variable):
        spec = getattr(sharding_of(array), "spec", None) or ()
        if any(spec):
            return (*spec, *[None] * (array.ndim - len(spec)))
    if not isinstance(variable, nnx.Variable):
        return ()
    return tuple(nnx.get_partition_spec(variable).get_value() or ())


def _arrays_of(variable):
    """Returns the arrays in a variable, or in the object that has replaced it."""
    is_variable = isinstance(variable, nnx.Variable)
    return jax.tree.leaves(variable.get_value() if is_variable else variable)


def mesh_of(array: Any) -> Mesh | None:
    """Returns the concrete mesh of an array's sharding, or None."""
    mesh = getattr(sharding_of(array), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def sharded_parameters(
    model: Any, axis_name: str | tuple[str, ...]
) -> Iterator[tuple[str, Any, tuple]]:
    """Yields each `nnx.Param` that is sharded over the axes, as (path, module, spec).

    `module` is the innermost module that contains the parameter. The parameter may be
    inside an object by which another library has replaced the module's parameter.
    """
    axes = set(axis_tuple(axis_name))
    nodes = dict(nnx.iter_graph(model))
    for path, node in nodes.items():
        if not isinstance(node, nnx.Param):
            continue
        spec = spec_of(node)
        if any(not axes.isdisjoint(axis_tuple(entry)) for entry in spec):
            end = len(path) - 1
            while end and not isinstance(nodes.get(path[:end]), nnx.Module):
                end -= 1
            yield ".".join(map(str, path)), nodes.get(path[:end]), spec


def _held_by_jax(dense):
    """Returns a copy of `dense` that holds the function `jax.lax.dot_general`.

    `jax.numpy.einsum` and `jax.numpy.dot`, which it stands in for, hold the function,
    too. So a replacement of the attribute `jax.lax.dot_general` intercepts none of
    them.
    """
    return dataclasses.replace(dense, original=interception.DOT_GENERAL.function)


def _count(features):
    return len(features) if isinstance(features, Sequence) else 1
