"""`ub.overlap`: overlaps the linear layers of an unmodified nnx model."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub._src import arguments, lowering_log
from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    shown,
)
from jax_ub._src.fp8.flax_state import Fp8State
from jax_ub._src.fp8.recipes import DelayedScaling, Recipe, check_layer_recipe
from jax_ub._src.retrofit.dot_general import DotGeneral
from jax_ub._src.retrofit.einsum import Einsum, Equation
from jax_ub._src.retrofit.selection import (
    DOT,
    DOT_GENERAL,
    EINSUM,
    Product,
    values_by_path,
)
from jax_ub._src.runtime.registry import LayerName
from jax_ub._src.sharding.layout import (
    ShardingLayout,
    parallel_of_spec,
    sharded_dim,
    sharding_of,
)


@arguments.keywords_checked
def overlap(  # noqa: PLR0913, options of layers
    model: Any,
    rules: Mapping[str, str | None] | str = "auto",
    *,
    axis_name: str | tuple[str, ...] = "tp",
    mesh: Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
    ub_names: Mapping[str, str] | None = None,
    fp8: Recipe | Mapping[str, Recipe | None] | None = None,
) -> Any:
    r"""Overlaps the linear layers of an unmodified nnx model with communication.

        model = ub.overlap(model)
        model = ub.overlap(model, {r".*\.(q|k|v|up)_proj": "column", r".*\.o": "row"})

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers and the
    `einsum_op` of its `nnx.Einsum` layers in place, and makes its `nnx.Embed` layers
    overlap `attend`. Parameters do not change. A second call replaces the settings of
    the layers that it selects, ends the overlap of layers that it maps to None, and
    does not change others. Other mesh axes of the kernels' sharding (FSDP) are read
    from the kernels and stored in the layers. `overlapped` lists the overlapped layers.

    With rules="auto", layers with a custom `dot_general`, such as quantized layers, and
    einsums that are not dense layers do not change. `ub.fallbacks` lists them, and
    every other parameter that is sharded over `axis_name` but not overlapped.

    The model works wherever the unmodified model does: it pickles, and it accepts
    parameters on another mesh. JAX computes a product that cannot be overlapped there,
    or that a library such as Qwix intercepts, and `ub.fallbacks` says why. On a mesh
    without an axis of `axis_name` or `data_axes`, the first call warns.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.
        rules: "auto" selects layers by their kernels' sharding: "column" if an out
            dimension is sharded over `axis_name`, "row" if an in dimension is. A
            dictionary selects them by path: it maps regular expressions, which must
            match whole paths such as "layers.0.up", to "column", "row" or None (no
            overlap). The first match counts. The path of a tied output projection is
            the path of its `nnx.Embed` followed by ".attend".
        axis_name: the tensor-parallel mesh axis, or a tuple of axes that act as one.
        mesh: the mesh; None takes the mesh of the kernel, or of `jax.set_mesh`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
        data_axes: the mesh axes that shard the leading axis of x; None takes all axes
            except `axis_name`.
        ub_names: maps regular expressions, which must match whole paths, to names that
            `initialize_ub` configures, such as "fc1". The first match counts. Other
            layers have no configuration, and errors name them by path.
        fp8: the FP8 recipe of the overlapped layers. Or a dictionary that maps regular
            expressions, which must match whole paths, to recipes; the first match
            counts, and other layers are not FP8. The state of `DelayedScaling` is in
            variables of type `jax_ub.flax.OverwriteWithGradient`.

    Returns:
        The model.

    Raises:
        UnknownNameError: if a rule matches no layer, if an expression of `ub_names` or
            `fp8` matches no overlapped layer, if one is not a regular expression, if
            the value of a rule is not a kind, or if `mesh`, else the mesh of
            `jax.set_mesh`, lacks an axis of `axis_name` or `data_axes`.
        ConfigurationError: if the recipe of a layer is not a recipe.
        ShapeContractError: if the model has no linear layer, `mesh` is not a mesh, the
            sharding of a kernel contradicts its rule, or "auto" finds no sharded
            kernel.
        UnsupportedOverlapError: if a rule matches a layer with a custom `dot_general`,
            or an einsum that is not a dense layer.
    """
    layers = dict(_layers_of(model))
    if not layers:
        raise ShapeContractError(
            f"overlap: the model, of type {type(model).__name__}, has no "
            "nnx.Linear, nnx.LinearGeneral, nnx.Einsum or nnx.Embed. Pass an nnx model "
            "that has one. Layers of linen take dot_general=ub.dot_general(kind), or "
            "`with jax_ub.flax.linen.Overlap(rules):` around their calls."
        )
    if isinstance(rules, Mapping):
        found = values_by_path("rules", rules, layers)
    else:
        found = _kinds_by_sharding(rules, layers, axis_name)
    kinds = {path: kind for path, kind in found.items() if kind is not None}
    _check_replaceable(layers, kinds)
    names = values_by_path("ub_names", ub_names, kinds)
    if isinstance(fp8, Mapping):
        recipes = values_by_path("fp8", fp8, kinds)
    else:
        check_layer_recipe("overlap", fp8)
        recipes = dict.fromkeys(kinds, fp8)
    replacements = {}
    for path, kind in kinds.items():
        layout = ShardingLayout(
            parallel=kind,
            axis_name=axis_name,
            mesh=mesh,
            data_axes=data_axes,
            sequence_parallel=sequence_parallel,
            method=method,
            ub_name=names.get(path, LayerName(path)),
            fp8=recipes.get(path),
        )
        layout.check_axes(layout.find_mesh())
        replacements[path] = _replacement(layers[path], layout)
    # The layers change after all checks, so that an error leaves the model unchanged.
    for path, replacement in replacements.items():
        layers[path].replace(replacement)
    for path in found.keys() - kinds.keys():
        layers[path].restore()
    _record_others(model, layers, axis_name)
    return model


def overlapped(model: Any) -> dict[str, str]:
    """Returns the layers of an nnx model that `ub.overlap` has overlapped, by path.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.

    Returns:
        A dictionary from paths, such as "layers.0.up", to "column" or "row".
    """
    products = ((path, layer.product) for path, layer in _layers_of(model))
    return {path: each.kind for path, each in products if _is_overlapped(each)}


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A module of an nnx model, with one kernel by which it multiplies its input.

    Attributes:
        node: the module.
        kernel: the kernel's variable, or an object by which another library, such as
            one for quantization, has replaced it.
        attribute: the attribute that is the product function, which multiplies x by the
            kernel, such as "dot_general".
        default: the product function that Flax sets by default, or None.
        num_in: the number of contracted dimensions of the kernel.
        sizes: the sizes of the kernel's dimensions, without those of stacked layers.
        order: the dimensions in `sizes` in the order [*in, *out].
        equation: the equation of an `nnx.Einsum` that is a dense layer, or None.
    """

    node: Any
    kernel: Any
    attribute: str
    default: Product | None
    num_in: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    equation: Equation | None = None

    @property
    def product(self) -> Any:
        return _without_state(getattr(self.node, self.attribute, None))

    @property
    def original(self) -> Any:
        """Returns the function, such as a `dot_general`, that `ub.overlap` replaces."""
        product = self.product
        return product.original if _is_overlapped(product) else product

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Returns the kernel's global shape, or () if it is unknown."""
        return tuple(getattr(self.kernel, "shape", ()))

    @property
    def size(self) -> int | None:
        """Returns the number of elements of one layer's kernel, or None if unknown."""
        shape = self.of_one_layer(self.stored_shape)
        return math.prod(shape) if shape else None

    @property
    def spec(self) -> tuple:
        """Returns the partition spec of one layer's kernel, as [*in, *out]."""
        spec = self.of_one_layer(_spec_of(self.kernel))
        spec = (*spec, *[None] * (len(self.order) - len(spec)))
        return tuple(spec[dim] for dim in self.order)

    def of_one_layer(self, dims):
        """Returns `dims` without the dimensions along which layers are stacked.

        `dims` has one item for each dimension of the stored kernel.
        """
        stacked = self.stacked_dims(len(dims))
        return tuple(item for dim, item in enumerate(dims) if dim not in stacked)

    def stacked_dims(self, num_dims: int) -> tuple[int, ...]:
        """Returns which of a kernel's `num_dims` dimensions index stacked layers.

        `nnx.vmap` stacks along any axis. The first dimensions are preferred.
        """
        num_stacked = max(num_dims - len(self.sizes), 0)
        if num_dims == len(self.stored_shape):
            for dims in itertools.combinations(range(num_dims), num_stacked):
                shape = tuple(np.delete(self.stored_shape, dims))
                if shape == self.sizes:
                    return dims
        return tuple(range(num_stacked))

    @property
    def mesh(self) -> Mesh | None:
        """Returns the concrete mesh over which the kernel is sharded, or None."""
        array = next(iter(_arrays_of(self.kernel)), None)
        mesh = getattr(sharding_of(array), "mesh", None)
        return mesh if isinstance(mesh, Mesh) else None

    def kind(self, axis_name: str | tuple[str, ...]) -> str | None:
        """Returns "column" if outputs are sharded, "row" if inputs are, else None."""
        return parallel_of_spec(self.spec, self.num_in, axis_name)

    def kept_reason(self) -> tuple[str, str] | None:
        """Returns why the layer's product cannot be replaced, and a fix, or None.

        A function that neither Flax nor `overlap` has set is kept, for example in a
        quantized layer.
        """
        product, default = self.product, self.default
        is_default = default is not None and product is default.function
        if product is not None and not is_default and not _is_overlapped(product):
            fix = f"Set it to {default.path} first" if default else "Remove it first"
            return f"has a custom {self.attribute}, {product}", fix
        if self.equation is not None or not isinstance(self.node, nnx.Einsum):
            return None
        return (
            f"has einsum_str = {shown(self.node.einsum_str)}, which is not a dense "
            "layer",
            "Write one with each label in two of x, kernel and result",
        )

    def replace(self, dense: DotGeneral) -> None:
        """Replaces the module's product function, such as `dot_general`, by `dense`."""
        product: Any = dense
        if self.attribute != "dot_general":
            # The product replaces `jax.numpy.einsum` or `jax.numpy.dot`, which call
            # `dot_general` directly. A library that replaces the attribute
            # `jax.lax.dot_general` does not intercept these calls, so it must not
            # intercept the product either.
            product = dataclasses.replace(dense, original=DOT_GENERAL.function)
        if self.equation is not None:
            dim = sharded_dim(self.spec, dense.sharding_layout.axis_name)
            labels = self.equation.ins + self.equation.outs
            label = "" if dim is None else labels[dim]
            product = Einsum(product, label, self.original)
        if isinstance(self.node, nnx.Embed):
            self.node.__class__ = OverlappedEmbed
        value: Any = nnx.static(product)
        recipe = dense.sharding_layout.fp8
        if isinstance(recipe, DelayedScaling):
            shape = self.stored_shape
            stacked = tuple(shape[dim] for dim in self.stacked_dims(len(shape)))
            value = nnx.data(StatefulProduct(product, Fp8State(recipe, stacked)))
        setattr(self.node, self.attribute, value)

    def restore(self) -> None:
        """Undoes `overlap`: the layer multiplies by its original function again."""
        if _is_overlapped(self.product) and self.default is not None:
            function = self.original or self.default.function
            setattr(self.node, self.attribute, nnx.static(function))
        elif _is_overlapped(self.product):
            delattr(self.node, self.attribute)
            self.node.__class__ = nnx.Embed


class StatefulProduct(nnx.Module):
    """A layer's `DotGeneral` or `Einsum`, with the FP8 state of `DelayedScaling`."""

    def __init__(self, product: DotGeneral | Einsum, fp8_state: Fp8State):
        self.product, self.fp8_state = product, fp8_state

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        """Multiplies the operands, quantized to FP8 with the state of the layer."""
        return self.product(*operands, fp8_state=self.fp8_state.arrays(), **options)


def _without_state(product):
    return product.product if isinstance(product, StatefulProduct) else product


class OverlappedEmbed(nnx.Embed):
    """An `nnx.Embed` whose `attend` overlaps its GEMM with communication.

    `ub.overlap` changes the class of an existing `nnx.Embed` to this one.
    """

    attend_dot_general: DotGeneral | StatefulProduct

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Computes logits `query @ embedding.T` for query [..., tokens, features]."""
        dense = _without_state(self.attend_dot_general)
        reason = dense.why_intercepted(DOT, None)
        if reason is not None:
            given = {} if out_sharding is None else {"out_sharding": out_sharding}
            with dense.falling_back(reason):
                return super().attend(query, **given)
        operands = (query, self.embedding[...])
        query, embedding = self.promote_dtype(operands, dtype=self.dtype)
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        return self.attend_dot_general(
            query, embedding, dims, out_sharding=out_sharding
        )


def _is_overlapped(product):
    return isinstance(product, DotGeneral | Einsum)


def _layers_of(model: Any) -> Iterator[tuple[str, _Layer]]:
    """Yields (path, layer) for each module of a model that `overlap` supports."""
    for path, node in nnx.iter_graph(model):
        name = ".".join(p if isinstance(p, str) else shown(p) for p in path)
        if isinstance(node, nnx.Einsum):
            yield name, _einsum_layer(node)
        elif isinstance(node, nnx.Linear) or (
            # An nnx.LinearGeneral with dot_general_cls ignores its attribute
            # dot_general, so replacing the attribute would have no effect. An
            # nnx.LinearGeneral with batch axes is not a dense layer.
            isinstance(node, nnx.LinearGeneral)
            and node.dot_general_cls is None
            and not node.batch_axis
        ):
            ins, outs = map(np.ravel, (node.in_features, node.out_features))
            sizes = (*ins.tolist(), *outs.tolist())
            dims = (len(ins), sizes, tuple(range(len(sizes))))
            yield name, _Layer(node, node.kernel, "dot_general", DOT_GENERAL, *dims)
        elif type(node) in (nnx.Embed, OverlappedEmbed):
            name = f"{name}.attend" if name else "attend"
            product, sizes = "attend_dot_general", (node.num_embeddings, node.features)
            yield name, _Layer(node, node.embedding, product, None, 1, sizes, (1, 0))


def _einsum_layer(node):
    equation = Equation.read(node.einsum_str)
    product, sizes = ("einsum_op", EINSUM), tuple(node.kernel_shape)
    if not equation.is_dense:
        order = tuple(range(len(sizes)))
        return _Layer(node, node.kernel, *product, 0, sizes, order)
    num_in = len(equation.ins)
    order = tuple(map(equation.kernel.index, equation.ins + equation.outs))
    return _Layer(node, node.kernel, *product, num_in, sizes, order, equation)


def _spec_of(variable: Any) -> tuple:
    """Returns the partition spec of an nnx variable, from its array or metadata."""
    for array in _arrays_of(variable):
        spec = getattr(sharding_of(array), "spec", None) or ()
        if any(spec):
            return (*spec, *[None] * (array.ndim - len(spec)))
    if not isinstance(variable, nnx.Variable):
        return ()
    return tuple(nnx.get_partition_spec(variable).get_value() or ())


def _arrays_of(variable):
    """Returns the arrays in an nnx variable, or in an object that replaces it."""
    is_variable = isinstance(variable, nnx.Variable)
    return jax.tree.leaves(variable.get_value() if is_variable else variable)


def _replacement(layer, layout):
    """Returns the overlapped `dot_general` that replaces a layer's product function.

    FSDP axes are taken from the kernel's sharding.
    """
    spec, num_in, kernel_mesh = layer.spec, layer.num_in, layer.mesh
    layout.check_kernel_spec(spec, num_in)
    layout = layout.with_fsdp_of(spec, layout.find_mesh() or kernel_mesh, num_in)
    # The CPU engine finds ranks by partition id, so a mesh without devices is enough.
    # Other engines need device ids, so the layer keeps the mesh of its kernel.
    if kernel_mesh is not None and any(
        device.platform != "cpu" for device in kernel_mesh.devices.flat
    ):
        layout = dataclasses.replace(layout, kernel_mesh=kernel_mesh)
    return DotGeneral(layout, layer.original, kernel_size=layer.size, is_lenient=True)


def _kinds_by_sharding(rules, layers, axis_name) -> dict[str, str]:
    """Maps layer paths to "column" or "row", read from the kernels' shardings.

    Layers with a custom product function are left out.
    """
    if not isinstance(rules, str) or rules != "auto":
        raise UnknownNameError(
            f'overlap: rules = {shown(rules)} is neither "auto" nor a dictionary. '
            'Pass, for example, {r".*\\.up": "column"} to select layers by path.'
        )
    items = layers.items()
    kinds = {path: kind for path, layer in items if (kind := layer.kind(axis_name))}
    if not kinds:
        path = next(iter(layers))
        raise ShapeContractError(
            f"overlap: none of the model's {len(layers)} linear layers has a kernel "
            f'sharded over {shown(axis_name)}, so rules="auto" selects no layer. Shard '
            f"the kernels first, or pass rules={{{shown(path)}: "
            '"column", ...}.'
        )
    return {path: k for path, k in kinds.items() if not layers[path].kept_reason()}


def _check_replaceable(layers, paths):
    for path in paths:
        if kept := layers[path].kept_reason():
            reason, fix = kept
            raise UnsupportedOverlapError(
                f"overlap: the layer {shown(path)} {reason}. {fix}, or exclude the "
                f"layer: {{{shown(path)}: None, ...}}."
            )


def _record_others(model, layers, axis_name):
    """Adds to `ub.fallbacks` the sharded parameters of layers that do not overlap."""
    by_node = {id(layer.node): path for path, layer in layers.items()}
    reasons: dict[str, str] = {}
    for path, module, spec in _sharded_parameters(model, axis_name):
        owner = by_node.get(id(module))
        if owner is None:
            # Layers of jax_ub.flax, which overlap by themselves, are no fallbacks.
            if hasattr(module, "sharding_layout"):
                continue
            why = f"belongs to a {type(module).__name__}, which overlap does not know"
        elif _is_overlapped(layers[owner].product):
            continue
        elif kept := layers[owner].kept_reason():
            reasons[owner] = f"the layer {kept[0]}"
            continue
        elif layers[owner].kind(axis_name) is None and len(axis_tuple(axis_name)) > 1:
            why = f"is not sharded over all of {shown(axis_name)}"
        else:
            why = f"belongs to the layer {shown(owner)}, which no rule overlaps"
        reasons[path] = f"the parameter, sharded {P(*spec)}, {why}"
    for path, reason in reasons.items():
        lowering_log.record_fallback(f"overlap({shown(path)})", reason)


def _sharded_parameters(model, axis_name) -> Iterator[tuple[str, Any, tuple]]:
    """Yields (path, module, spec) for each `nnx.Param` sharded over `axis_name`.

    `module` is the innermost module that contains the parameter. Another library may
    have replaced the module's parameter by an object that contains it.
    """
    axes = set(axis_tuple(axis_name))
    nodes = dict(nnx.iter_graph(model))
    for path, node in nodes.items():
        if not isinstance(node, nnx.Param):
            continue
        spec = _spec_of(node)
        if any(not axes.isdisjoint(axis_tuple(entry)) for entry in spec):
            end = len(path) - 1
            while end and not isinstance(nodes.get(path[:end]), nnx.Module):
                end -= 1
            yield ".".join(map(str, path)), nodes.get(path[:end]), spec
