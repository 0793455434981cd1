"""The `flax.nnx` layers whose GEMM `ub.overlap` can overlap."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import shown
from jax_ub._src.retrofit import interception
from jax_ub._src.retrofit.dot_general import DotGeneral
from jax_ub._src.retrofit.einsum import Einsum, Equation
from jax_ub._src.sharding.layout import sharded_dim, sharding_of


class Layer(abc.ABC):
    """Uniform access to an nnx module with one kernel, and to its product function.

    Attributes:
        node: the module.
        kernel: the kernel's variable, or the object that another library, such as one
            for quantization, has replaced it with.
    """

    function = "jax.lax.dot_general"
    described = "a dot_general"

    def __init__(self, node: Any, kernel: Any):
        """Stores the nnx module and its kernel variable."""
        self.node = node
        self.kernel = kernel

    @property
    @abc.abstractmethod
    def op(self) -> Any:
        """Returns the function by which the module now multiplies x and kernel."""

    @property
    @abc.abstractmethod
    def originals(self) -> tuple[Any, ...]:
        """Returns the product functions that Flax sets by default."""

    @property
    @abc.abstractmethod
    def num_in(self) -> int:
        """Returns how many dimensions of the kernel are contracted with x."""

    @abc.abstractmethod
    def in_out(self, dims: Sequence) -> tuple:
        """Reorders one item per kernel dimension from stored order to [*in, *out]."""

    @abc.abstractmethod
    def replace(self, dense: DotGeneral) -> None:
        """Sets the module's product function to `dense`, which overlaps."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the kernel's global shape, without leading axes of stacked layers."""
        return tuple(getattr(self.kernel, "shape", ()))[-self.num_dims :]

    @property
    @abc.abstractmethod
    def num_dims(self) -> int:
        """Returns the number of kernel dimensions, without axes of stacked layers."""

    @property
    def spec(self) -> tuple:
        """Returns the kernel's partition spec as [*in, *out].

        It is taken from the kernel's array or its metadata.
        """
        spec = spec_of(self.kernel)[-self.num_dims :]
        return self.in_out((*spec, *[None] * (self.num_dims - len(spec))))

    @property
    def mesh(self) -> Mesh | None:
        """Returns the concrete mesh over which the kernel is sharded, or None."""
        return next(map(mesh_of, _arrays_of(self.kernel)), None)

    @property
    def replaced(self) -> Any:
        """Returns the module's product function from before `overlap` replaced it."""
        op = self.op
        return op.original if isinstance(op, DotGeneral | Einsum) else op

    def why_kept(self) -> tuple[str, str] | None:
        """Returns why `overlap` must not replace the product function, with a fix.

        Returns None if it may replace the function.

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
    """An `nnx.Linear` or `nnx.LinearGeneral`, which multiplies by a `dot_general`."""

    def __init__(self, node: Any):
        """Stores the `nnx.Linear` or `nnx.LinearGeneral` module."""
        super().__init__(node, node.kernel)

    @property
    def op(self):
        """Returns the module's attribute `dot_general`."""
        return self.node.dot_general

    @property
    def originals(self):
        """Returns `jax.lax.dot_general`, which Flax sets by default."""
        return (interception.DOT_GENERAL.function,)

    @property
    def num_in(self):
        """Returns the number of input feature dimensions of the module."""
        return _count(self.node.in_features)

    @property
    def num_dims(self):
        """Returns the number of input plus output feature dimensions."""
        return self.num_in + _count(self.node.out_features)

    def in_out(self, dims):
        """Keeps the order, because the kernel is stored as [*in, *out]."""
        return tuple(dims)

    def replace(self, dense):
        """Sets the module's attribute `dot_general` to `dense`."""
        self.node.dot_general = dense


class EinsumLayer(Layer):
    """An `nnx.Einsum`, which multiplies by an `einsum_op`."""

    function = "jax.numpy.einsum"
    described = "an einsum_op"

    def __init__(self, node: Any):
        """Stores the `nnx.Einsum` module, and parses its equation."""
        super().__init__(node, node.kernel)
        equation = None if node.einsum_str is None else Equation.read(node.einsum_str)
        self.equation = equation if equation and equation.is_dense else None

    @property
    def op(self):
        """Returns the module's attribute `einsum_op`."""
        return self.node.einsum_op

    @property
    def originals(self):
        """Returns `jax.numpy.einsum`, which Flax sets by default."""
        return (interception.EINSUM.function,)

    @property
    def num_in(self):
        """Returns how many labels are contracted; 0 if the equation is not dense."""
        return 0 if self.equation is None else len(self.equation.ins)

    @property
    def num_dims(self):
        """Returns the number of dimensions in the module's `kernel_shape`."""
        return len(self.node.kernel_shape)

    def in_out(self, dims):
        """Reorders one item per kernel label to the order of [*ins, *outs]."""
        if self.equation is None:
            return tuple(dims)
        found = dict(zip(self.equation.kernel, dims, strict=True))
        return tuple(found[label] for label in self.equation.ins + self.equation.outs)

    def replace(self, dense):
        """Sets the module's attribute `einsum_op` to an overlapped einsum."""
        label, dim = "", sharded_dim(self.spec, dense.sharding_layout.axis_name)
        if self.equation is not None and dim is not None:
            label = (self.equation.ins + self.equation.outs)[dim]
        self.node.einsum_op = Einsum(_held_by_jax(dense), label, self.replaced)

    def why_kept(self):
        """Returns why `overlap` must not replace the einsum, with a fix; or None.

        Einsums that are not dense layers are not replaced.
        """
        kept = super().why_kept()
        if kept is not None or self.equation is not None:
            return kept
        text = shown(self.node.einsum_str)
        return (
            f"has einsum_str = {text}, which is no dense layer's",
            "Write one with each label in two of x, kernel and result",
        )


class AttendLayer(Layer):
    """An `nnx.Embed`, whose `attend` multiplies by the transposed embedding."""

    num_in = 1
    num_dims = 2

    def __init__(self, node: Any):
        """Stores the `nnx.Embed` module."""
        super().__init__(node, node.embedding)

    @property
    def op(self):
        """Returns the product function of an `OverlappedEmbed`, else None."""
        return getattr(self.node, "attend_dot_general", None)

    @property
    def originals(self):
        """Returns no functions, because `nnx.Embed` has no such attribute."""
        return ()

    def in_out(self, dims):
        """Reverses the order, because the embedding is stored as [out, in]."""
        return tuple(dims)[::-1]

    def replace(self, dense):
        """Changes the class of the module to `OverlappedEmbed`."""
        self.node.__class__ = OverlappedEmbed
        self.node.attend_dot_general = _held_by_jax(dense)


class OverlappedEmbed(nnx.Embed):
    """An `nnx.Embed` whose `attend` overlaps its GEMM with communication.

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
    """Yields (path, `Layer`) for each module of a model that `overlap` supports."""
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
    """Returns the partition spec of an nnx variable, from its array or its metadata."""
    for array in _arrays_of(variable):
        spec = getattr(sharding_of(array), "spec", None) or ()
        if any(spec):
            return (*spec, *[None] * (array.ndim - len(spec)))
    if not isinstance(variable, nnx.Variable):
        return ()
    return tuple(nnx.get_partition_spec(variable).get_value() or ())


def _arrays_of(variable):
    """Returns the arrays in an nnx variable or in an object that replaced it."""
    is_variable = isinstance(variable, nnx.Variable)
    return jax.tree.leaves(variable.get_value() if is_variable else variable)


def mesh_of(array: Any) -> Mesh | None:
    """Returns the concrete mesh over which an array is sharded, or None."""
    mesh = getattr(sharding_of(array), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def sharded_parameters(
    model: Any, axis_name: str | tuple[str, ...]
) -> Iterator[tuple[str, Any, tuple]]:
    """Yields (path, module, spec) for each `nnx.Param` sharded over mesh axes.

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
    """Returns a copy of `dense` whose fallback is the original `dot_general`.

    `jax.numpy.einsum` and `jax.numpy.dot`, which it stands in for, hold the function,
    too. So a replacement of the attribute `jax.lax.dot_general` intercepts none of
    them.
    """
    return dataclasses.replace(dense, original=interception.DOT_GENERAL.function)


def _count(features):
    return len(features) if isinstance(features, Sequence) else 1
