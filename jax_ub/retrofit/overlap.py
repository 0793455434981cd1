"""Overlap for an unmodified nnx model, in one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.sharding import Mesh

from jax_ub import methods
from jax_ub.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
)
from jax_ub.retrofit.dot_general import DotGeneral, dot_general
from jax_ub.retrofit.placement import kind_of_spec, resolve_kind, sharding_of
from jax_ub.runtime.overlaps import LayerPath


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

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers, in place;
    parameters are left as they are. Calling it again replaces what it set before.
    `overlapped` lists the result. A layer with a `dot_general` of its own, such as a
    quantized one, keeps it: "auto" leaves it alone, and `ub.fallbacks` says so.

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
            own.
    """
    layers = dict(_linear_layers(model))
    if not layers:
        raise ShapeContractError(
            f"overlap: the model, of type {type(model).__name__}, has no nnx.Linear "
            "and no nnx.LinearGeneral. Pass an nnx model that has; linen's layers take "
            "dot_general=ub.dot_general(kind)."
        )
    if not isinstance(rules, Mapping):
        _check_auto(rules)
        kinds = _without_own(layers, _by_sharding(layers, axis_name))
    else:
        kinds = _by_path(rules, list(layers))
        _check_none_own(layers, kinds)
    chosen = {}
    for path, kind in kinds.items():
        layer = layers[path]
        chosen[path] = dot_general(
            kind,
            axis_name=axis_name,
            mesh=mesh if mesh is not None else _mesh(layer),
            method=method,
            sequence_parallel=sequence_parallel,
            data_axes=data_axes,
            ub_name=LayerPath(path),
        )
        chosen[path].placement.check_kernel_spec(_spec(layer), _num_in(layer))
    # Only now, so that a refused call leaves the model as it was.
    for path, replacement in chosen.items():
        layers[path].dot_general = replacement
    return model


def overlapped(model: Any) -> dict[str, str]:
    """Lists the layers that `overlap` reached.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.

    Returns:
        By path, such as "layers.0.up", "column" or "row".
    """
    return {
        path: layer.dot_general.kind
        for path, layer in _linear_layers(model)
        if isinstance(layer.dot_general, DotGeneral)
    }


def _linear_layers(model) -> Iterator[tuple[str, Any]]:
    """Yields the path and the node of every layer with a `dot_general` to replace."""
    from flax import nnx  # flax is optional, and only this function needs it

    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Linear) or (
            # A dot_general_cls is used instead, and batch axes are no dense layer's.
            isinstance(node, nnx.LinearGeneral)
            and node.dot_general_cls is None
            and not node.batch_axis
        ):
            yield ".".join(map(str, path)), node


def _num_in(layer) -> int:
    """Returns how many dimensions of the layer's kernel are contracted."""
    return _count(layer.in_features)


def _count(features):
    return len(features) if isinstance(features, Sequence) else 1


def _check_auto(rules):
    if rules != "auto":
        raise UnknownNameError(
            f'overlap: rules = {rules!r} is neither "auto" nor a dictionary. Pass, for '
            'example, {r".*\\.up": "column"} to go by path.'
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
            f'sharded over {axis_name!r}, so that rules="auto" finds nothing to do. '
            f'Shard the kernels first, or pass rules={{{path!r}: "column", ...}}.'
        )
    return kinds


def _by_path(rules, paths) -> dict[str, str]:
    """Returns the kinds of the layers that `rules` match."""
    found: dict[str, str | None] = {}
    for pattern, kind in rules.items():
        resolved = None if kind is None else resolve_kind("overlap", kind)
        matched = list(filter(_compiled(pattern).fullmatch, paths))
        if not matched:
            raise UnknownNameError(
                f"overlap: the rule {pattern!r} matches no linear layer of the model; "
                f"a rule must match a whole path. {nearest(pattern, paths)}"
            )
        for path in matched:
            found.setdefault(path, resolved)
    return {path: kind for path, kind in found.items() if kind is not None}


def _own(layer):
    """Returns a layer's `dot_general` where it is neither jax's nor ours, or None."""
    found = layer.dot_general
    return None if found is lax.dot_general or isinstance(found, DotGeneral) else found


def _without_own(layers, kinds) -> dict[str, str]:
    """Leaves out, and notes, the layers with a `dot_general` of their own."""
    kept = {}
    for path, kind in kinds.items():
        own = _own(layers[path])
        if own is None:
            kept[path] = kind
        else:
            reason = f"the layer has a dot_general of its own, {own}"
            methods.record_fallback(f"overlap({path!r})", reason)
    return kept


def _check_none_own(layers, paths):
    for path in paths:
        own = _own(layers[path])
        if own is not None:
            raise UnsupportedOverlapError(
                f"overlap: the layer {path!r} has a dot_general of its own, {own}, "
                "which the rule would replace. Set it to jax.lax.dot_general first, or "
                f"leave the layer alone: {{{path!r}: None, ...}}."
            )


def _compiled(pattern) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UnknownNameError(
            f"overlap: the rule {pattern!r} is no regular expression: {error}. Escape "
            "what is meant as it stands, for example with re.escape(path)."
        ) from error


def _spec(layer) -> tuple:
    """Returns the layout of a kernel [in..., out...], by its array or its metadata."""
    from flax import nnx

    kernel = layer.kernel
    num_dims = _num_in(layer) + _count(layer.out_features)
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
