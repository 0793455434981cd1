"""Overlap for an unmodified nnx model, in one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jax_ub import methods
from jax_ub.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.retrofit.dot_general import DotGeneral, dot_general
from jax_ub.retrofit.einsum import Einsum, Equation
from jax_ub.retrofit.placement import (
    kind_of_spec,
    resolve_kind,
    sharded_dim,
    sharding_of,
)
from jax_ub.runtime.overlaps import LayerPath

# What Flax's layers have by default, and what `overlap` sets: it may replace both.
_PLAIN = (None, lax.dot_general, jnp.einsum)
_OURS = (DotGeneral, Einsum)


def overlap(
    model: Any,
    rules: Mapping[str, str | None] | str = "auto",
    *,
    axis_name: str = "tp",
    mesh: Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
) -> Any:
    r"""Overlaps the linear layers of an unmodified `flax.nnx` model.

        model = ub.overlap(model)
        model = ub.overlap(model, {r".*\.(q|k|v|up)_proj": "column", r".*\.o": "row"})

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers, and the
    `einsum_op` of its `nnx.Einsum` layers, in place; parameters are left as they are.
    Calling it again replaces what it set before. Further axes of the kernels' sharding
    (FSDP) are known to the layers from then on. `overlapped` lists the result. A layer
    with a `dot_general` of its own, such as a quantized one, keeps it, and an einsum
    that is no dense layer's is left as it is: "auto" leaves both alone, and
    `ub.fallbacks` says so.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.
        rules: "auto" goes by the kernels' sharding: "column" where an out dimension is
            sharded over `axis_name`, "row" where an in dimension is. A dictionary goes
            by path: regular expressions that match whole paths, such as "layers.0.up",
            to "column", "row" or None (leave it alone). The first that matches counts.
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of the kernel, or of `jax.set_mesh`.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
        data_axes: the mesh axes over the leading axis of x; None takes all the others.

    Returns:
        The model.

    Raises:
        UnknownNameError: if a rule matches no layer, is no regular expression, or names
            no kind.
        ShapeContractError: if the model has no linear layer, `mesh` is none, a kernel
            is sharded the other way than its rule says, or "auto" finds no sharded
            kernel.
        UnsupportedOverlapError: if a rule names a layer with a `dot_general` of its
            own, or an einsum that is no dense layer's.
    """
    layers = dict(_linear_layers(model))
    if not layers:
        raise ShapeContractError(
            f"overlap: the model, of type {type(model).__name__}, has no "
            "nnx.Linear, nnx.LinearGeneral or nnx.Einsum. Pass an nnx model that has; "
            "linen's layers take dot_general=ub.dot_general(kind), or "
            "nn.intercept_methods(jax_ub.flax.linen.Overlap(rules)) around their calls."
        )
    if not isinstance(rules, Mapping):
        _check_auto(rules)
        kinds = _without_kept(layers, _by_sharding(layers, axis_name))
    else:
        kinds = _by_path(rules, list(layers))
        _check_none_kept(layers, kinds)
    chosen = {}
    for path, kind in kinds.items():
        layer = layers[path]
        own = dot_general(
            kind,
            axis_name=axis_name,
            mesh=mesh if mesh is not None else _mesh(layer),
            method=method,
            sequence_parallel=sequence_parallel,
            data_axes=data_axes,
            ub_name=LayerPath(path),
        ).placement
        spec, num_in = _spec(layer), _num_in(layer)
        own.check_kernel_spec(spec, num_in)
        chosen[path] = DotGeneral(own.with_fsdp_of(spec, own.find_mesh(), num_in))
    # Only now, so that a refused call leaves the model as it was.
    for path, replacement in chosen.items():
        layer = layers[path]
        if _is_einsum(layer):
            layer.einsum_op = Einsum(replacement, _sharded_label(layer, axis_name))
        else:
            layer.dot_general = replacement
    return model


def overlapped(model: Any) -> dict[str, str]:
    """Lists the layers that `overlap` reached.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.

    Returns:
        By path, such as "layers.0.up", "column" or "row".
    """
    ops = ((path, _op(layer)) for path, layer in _linear_layers(model))
    return {path: op.kind for path, op in ops if isinstance(op, _OURS)}


def _linear_layers(model) -> Iterator[tuple[str, Any]]:
    """Yields the path and the node of every layer with an op to replace."""
    from flax import nnx  # flax is optional, and only these functions need it

    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Linear | nnx.Einsum) or (
            # A dot_general_cls is used instead, and batch axes are no dense layer's.
            isinstance(node, nnx.LinearGeneral)
            and node.dot_general_cls is None
            and not node.batch_axis
        ):
            yield ".".join(map(str, path)), node


def _is_einsum(layer) -> bool:
    from flax import nnx

    return isinstance(layer, nnx.Einsum)


def _equation(layer) -> Equation | None:
    """Returns the equation of an `nnx.Einsum` that is a dense layer, or None."""
    equation = Equation.read(layer.einsum_str)
    return equation if equation.is_dense else None


def _op(layer):
    """Returns what the layer multiplies with."""
    return layer.einsum_op if _is_einsum(layer) else layer.dot_general


def _num_in(layer) -> int:
    """Returns how many dimensions of the layer's kernel are contracted."""
    if _is_einsum(layer):
        equation = _equation(layer)
        return 0 if equation is None else len(equation.ins)
    return _count(layer.in_features)


def _count(features):
    return len(features) if isinstance(features, Sequence) else 1


def _check_auto(rules):
    if rules != "auto":
        raise UnknownNameError(
            f'overlap: rules = {shown(rules)} is neither "auto" nor a dictionary. '
            'Pass, for example, {r".*\\.up": "column"} to go by path.'
        )


def _by_sharding(layers, axis_name) -> dict[str, str]:
    """Returns the kinds of the layers whose kernels are sharded over `axis_name`."""
    kinds = {}
    for path, layer in layers.items():
        kind = kind_of_spec(_spec(layer), _num_in(layer), axis_name)
        if kind is not None:
            kinds[path] = kind
    if not kinds:
        path = next(iter(layers))
        raise ShapeContractError(
            f"overlap: none of the model's {len(layers)} linear layers has a kernel "
            f'sharded over {shown(axis_name)}, so that rules="auto" finds nothing to '
            f"do. Shard the kernels first, or pass "
            f'rules={{{shown(path)}: "column", ...}}.'
        )
    return kinds


def _by_path(rules, paths) -> dict[str, str]:
    """Returns the kinds of the layers that `rules` match."""
    found: dict[str, str | None] = {}
    for pattern, kind in rules.items():
        resolved = None if kind is None else resolve_kind("overlap", kind)
        matched = list(filter(compile_rule(pattern).fullmatch, paths))
        if not matched:
            raise UnknownNameError(
                f"overlap: the rule {shown(pattern)} matches no linear layer of the "
                f"model; a rule must match a whole path. {nearest(pattern, paths)}"
            )
        for path in matched:
            found.setdefault(path, resolved)
    return {path: kind for path, kind in found.items() if kind is not None}


def _why_kept(layer) -> tuple[str, str] | None:
    """Says why a layer keeps its op, and what would change that, or None."""
    op = _op(layer)
    name, plain = "a dot_general", "jax.lax.dot_general"
    if _is_einsum(layer):
        name, plain = "an einsum_op", "jax.numpy.einsum"
    if op not in _PLAIN and not isinstance(op, _OURS):
        return f"has {name} of its own, {op}", f"Set it to {plain} first"
    if _is_einsum(layer) and _equation(layer) is None:
        return (
            f"has einsum_str = {shown(layer.einsum_str)}, which is no dense layer's",
            "Write one with each label in two of x, kernel and result",
        )
    return None


def _without_kept(layers, kinds) -> dict[str, str]:
    """Leaves out, and notes, the layers that keep their op."""
    found = {}
    for path, kind in kinds.items():
        kept = _why_kept(layers[path])
        if kept is None:
            found[path] = kind
        else:
            methods.record_fallback(f"overlap({shown(path)})", f"the layer {kept[0]}")
    return found


def _check_none_kept(layers, paths):
    for path in paths:
        kept = _why_kept(layers[path])
        if kept is not None:
            reason, fix = kept
            raise UnsupportedOverlapError(
                f"overlap: the layer {shown(path)} {reason}. {fix}, or leave the layer "
                f"alone: {{{shown(path)}: None, ...}}."
            )


def compile_rule(pattern: str) -> re.Pattern[str]:
    """Reads the path of a rule.

    Raises:
        UnknownNameError: if it is no regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UnknownNameError(
            f"overlap: the rule {shown(pattern)} is no regular expression: {error}. "
            "Escape what is meant as it stands, for example with re.escape(path)."
        ) from error


def _spec(layer) -> tuple:
    """Returns the layout of a kernel [in..., out...], by its array or its metadata."""
    if not _is_einsum(layer):
        num_dims = _num_in(layer) + _count(layer.out_features)
        return _kernel_spec(layer.kernel, num_dims)
    spec = _kernel_spec(layer.kernel, len(layer.kernel_shape))
    equation = _equation(layer)
    if equation is None or not spec:
        return spec
    entries = dict(zip(equation.kernel, spec, strict=False))
    return tuple(entries.get(label) for label in equation.ins + equation.outs)


def _sharded_label(layer, axis_name) -> str:
    """Returns the label of an einsum's dimension on `axis_name`, "" where none is."""
    equation, dim = _equation(layer), sharded_dim(_spec(layer), axis_name)
    if equation is None or dim is None:
        return ""
    return (equation.ins + equation.outs)[dim]


def _kernel_spec(kernel, num_dims) -> tuple:
    """Returns the layout of a kernel of `num_dims` in the order of its dimensions."""
    from flax import nnx

    by_array = getattr(sharding_of(kernel.get_value()), "spec", ())
    if any(by_array):
        # The kernels of stacked layers have leading axes of their own.
        whole = (*by_array, *[None] * (kernel.ndim - len(by_array)))
        return whole[-num_dims:]
    return tuple(nnx.get_partition_spec(kernel).get_value() or ())[-num_dims:]


def _mesh(layer):
    """Returns the mesh and devices of a kernel, None where it lies on one device."""
    mesh = getattr(sharding_of(layer.kernel.get_value()), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None
