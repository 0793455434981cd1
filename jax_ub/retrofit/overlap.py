"""Overlap for an unmodified nnx model, in one line."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub import methods
from jax_ub.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.retrofit.dot_general import DotGeneral, dot_general
from jax_ub.retrofit.einsum import Einsum
from jax_ub.retrofit.sharding_layout import kind_of_spec, resolve_kind
from jax_ub.runtime.overlaps import LayerName
from jax_ub.shapes import axis_tuple

if TYPE_CHECKING:
    from jax_ub.retrofit.nnx_layers import Layer

_OURS = (DotGeneral, Einsum)


def overlap(
    model: Any,
    rules: Mapping[str, str | None] | str = "auto",
    *,
    axis_name: str | tuple[str, ...] = "tp",
    mesh: Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
    ub_names: Mapping[str, str] | None = None,
) -> Any:
    r"""Overlaps the linear layers of an unmodified `flax.nnx` model.

        model = ub.overlap(model)
        model = ub.overlap(model, {r".*\.(q|k|v|up)_proj": "column", r".*\.o": "row"})

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers, and the
    `einsum_op` of its `nnx.Einsum` layers, in place, and makes its `nnx.Embed` layers
    overlap `attend`; parameters are left as they are. Calling it again replaces what it
    set before. Further axes of the kernels' sharding (FSDP) are known to the layers
    from then on. `overlapped` lists the result. A layer with a `dot_general` of its
    own, such as a quantized one, keeps it, and an einsum that is no dense layer's is
    left as it is: "auto" leaves both alone. `ub.fallbacks` says so, and lists every
    other parameter that is sharded over `axis_name` but is not overlapped.

    The model works wherever the unmodified model does: it pickles, and takes parameters
    on another mesh. A call that cannot be overlapped there, or whose product something
    intercepts, as Qwix does, is left to JAX, and `ub.fallbacks` says why.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.
        rules: "auto" goes by the kernels' sharding: "column" where an out dimension is
            sharded over `axis_name`, "row" where an in dimension is. A dictionary goes
            by path: regular expressions that match whole paths, such as "layers.0.up",
            to "column", "row" or None (leave it alone). The first that matches counts.
            The path of a tied head is that of its `nnx.Embed`, then ".attend".
        axis_name: the tensor-parallel mesh axis, or several taken as one.
        mesh: the mesh; None takes that of the kernel, or of `jax.set_mesh`.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
        data_axes: the mesh axes over the leading axis of x; None takes all the others.
        ub_names: the names that `initialize_ub` configures, such as "fc1", by regular
            expressions that match whole paths. The first that matches counts. The other
            layers are named by their paths in errors, and have no configuration.

    Returns:
        The model.

    Raises:
        UnknownNameError: if a rule or an expression of `ub_names` matches no layer, or
            is no regular expression, or a rule names no kind.
        ShapeContractError: if the model has no linear layer, `mesh` is none, a kernel
            is sharded the other way than its rule says, or "auto" finds no sharded
            kernel.
        UnsupportedOverlapError: if a rule names a layer with a `dot_general` of its
            own, or an einsum that is no dense layer's.
    """
    layers = _layers(model)
    if not layers:
        raise ShapeContractError(
            f"overlap: the model, of type {type(model).__name__}, has no "
            "nnx.Linear, nnx.LinearGeneral, nnx.Einsum or nnx.Embed. Pass an nnx model "
            "that has; linen's layers take dot_general=ub.dot_general(kind), or "
            "nn.intercept_methods(jax_ub.flax.linen.Overlap(rules)) around their calls."
        )
    if not isinstance(rules, Mapping):
        _check_auto(rules)
        found = _by_sharding(layers, axis_name)
        kinds = _without_kept(layers, found)
    else:
        kinds = _by_path(rules, list(layers))
        _check_none_kept(layers, kinds)
    names = _names(ub_names, list(kinds))
    chosen = {}
    for path, kind in kinds.items():
        layer = layers[path]
        own = dot_general(
            kind,
            axis_name=axis_name,
            mesh=mesh,
            method=method,
            sequence_parallel=sequence_parallel,
            data_axes=data_axes,
            ub_name=names.get(path, LayerName(path)),
        )
        spec, num_in, kernel_mesh = layer.spec, layer.num_in, layer.mesh
        own.sharding_layout.check_kernel_spec(spec, num_in)
        known = own.sharding_layout.find_mesh() or kernel_mesh
        sharding_layout = own.sharding_layout.with_fsdp_of(spec, known, num_in)
        if kernel_mesh is not None and not _finds_ranks_by_partition(kernel_mesh):
            sharding_layout = dataclasses.replace(
                sharding_layout, kernel_mesh=kernel_mesh
            )
        chosen[path] = DotGeneral(
            sharding_layout,
            original=layer.replaced,
            kernel_shape=layer.in_out(layer.shape),
            is_lenient=True,
        )
    # Only now, so that a refused call leaves the model as it was.
    for path, replacement in chosen.items():
        layers[path].replace(replacement)
    _record_others(model, layers, chosen, axis_name)
    return model


def _finds_ranks_by_partition(mesh):
    """Whether the engine needs no devices to run a program of an abstract mesh."""
    return all(device.platform == "cpu" for device in mesh.devices.flat)


def overlapped(model: Any) -> dict[str, str]:
    """Lists the layers that `overlap` reached.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.

    Returns:
        By path, such as "layers.0.up", "column" or "row".
    """
    ops = ((path, layer.op) for path, layer in _layers(model).items())
    return {path: op.kind for path, op in ops if isinstance(op, _OURS)}


def _layers(model) -> "dict[str, Layer]":
    from jax_ub.retrofit.nnx_layers import layers_of  # flax is optional

    return dict(layers_of(model))


def _record_others(model, layers, chosen, axis_name):
    """Notes the parameters that are sharded over the axis, but are not overlapped."""
    from jax_ub.retrofit.nnx_layers import sharded_parameters

    by_node = {id(layer.node): path for path, layer in layers.items()}
    for path, module, spec in sharded_parameters(model, axis_name):
        layer = by_node.get(id(module))
        # Layers that keep their function are noted already; those of jax_ub.flax
        # communicate by themselves.
        is_noted = layer in chosen or (layer and layers[layer].why_kept() is not None)
        if is_noted or hasattr(module, "sharding_layout"):
            continue
        why = f"belongs to a {type(module).__name__}, which overlap does not know"
        if layer is not None:
            why = f"belongs to the layer {shown(layer)}, which no rule overlaps"
            kind = kind_of_spec(layers[layer].spec, layers[layer].num_in, axis_name)
            if kind is None and len(axis_tuple(axis_name)) > 1:
                why = f"is not sharded over all of {shown(axis_name)}"
        reason = f"the parameter, sharded {P(*spec)}, {why}"
        methods.record_fallback(f"overlap({shown(path)})", reason)


def check_rules(argument: str, rules: Any) -> Mapping:
    """Returns what is given by path; empty for None.

    Raises:
        UnknownNameError: if it is no dictionary.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise UnknownNameError(
            f"overlap: {argument} = {shown(rules)} is not a dictionary. Pass, for "
            'example, {r".*\\.up": ...} to go by path.'
        )
    return rules or {}


def _names(ub_names, paths) -> dict[str, str]:
    """Returns the names that `ub_names` gives to layers."""
    found: dict[str, str] = {}
    for pattern, name in check_rules("ub_names", ub_names).items():
        if not isinstance(name, str):
            raise UnknownNameError(
                f"overlap: ub_names = {{{shown(pattern)}: {shown(name)}}} names a "
                f"layer by a {type(name).__name__}. Pass the name of a layer, such as "
                '"fc1".'
            )
        for path in _matching(f"{shown(pattern)} of ub_names", pattern, paths):
            found.setdefault(path, name)
    return found


def _matching(described, pattern, paths):
    matched = list(filter(compile_rule(pattern).fullmatch, paths))
    if not matched:
        raise UnknownNameError(
            f"overlap: {described} matches no linear layer of the model; a rule must "
            f"match a whole path. {nearest(pattern, paths)}"
        )
    return matched


def _check_auto(rules):
    if not isinstance(rules, str) or rules != "auto":
        raise UnknownNameError(
            f'overlap: rules = {shown(rules)} is neither "auto" nor a dictionary. '
            'Pass, for example, {r".*\\.up": "column"} to go by path.'
        )


def _by_sharding(layers, axis_name) -> dict[str, str]:
    """Returns the kinds of the layers whose kernels are sharded over `axis_name`."""
    kinds = {}
    for path, layer in layers.items():
        kind = kind_of_spec(layer.spec, layer.num_in, axis_name)
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
        for path in _matching(f"the rule {shown(pattern)}", pattern, paths):
            found.setdefault(path, resolved)
    return {path: kind for path, kind in found.items() if kind is not None}


def _without_kept(layers, kinds) -> dict[str, str]:
    """Leaves out, and notes, the layers that keep their op."""
    found = {}
    for path, kind in kinds.items():
        kept = layers[path].why_kept()
        if kept is None:
            found[path] = kind
        else:
            methods.record_fallback(f"overlap({shown(path)})", f"the layer {kept[0]}")
    return found


def _check_none_kept(layers, paths):
    for path in paths:
        kept = layers[path].why_kept()
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
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UnknownNameError(
            f"overlap: the rule {shown(pattern)} is no regular expression: {error}. "
            "Escape what is meant as it stands, for example with re.escape(path)."
        ) from error
