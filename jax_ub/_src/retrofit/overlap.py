"""`ub.overlap`: overlaps the linear layers of an unmodified nnx model."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub._src import lowering_log
from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.retrofit.dot_general import DotGeneral, dot_general
from jax_ub._src.retrofit.einsum import Einsum
from jax_ub._src.runtime.registry import LayerName
from jax_ub._src.sharding.layout import kind_of_spec, resolve_kind

if TYPE_CHECKING:
    from jax_ub._src.retrofit.nnx_layers import Layer

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

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers and the
    `einsum_op` of its `nnx.Einsum` layers in place, and makes its `nnx.Embed` layers
    overlap `attend`. Parameters do not change. A second call replaces the settings of
    the first. Other mesh axes of the kernels' sharding (FSDP) are read from the kernels
    and stored in the layers. `overlapped` lists the overlapped layers.

    With rules="auto", layers with a custom `dot_general`, such as quantized layers, and
    einsums that are not dense layers do not change. `ub.fallbacks` lists them, and
    every other parameter that is sharded over `axis_name` but not overlapped.

    The model works wherever the unmodified model does: it pickles, and it accepts
    parameters on another mesh. JAX computes a product that cannot be overlapped there,
    or that a library such as Qwix intercepts, and `ub.fallbacks` says why.

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

    Returns:
        The model.

    Raises:
        UnknownNameError: if a rule or an expression of `ub_names` matches no layer, or
            is not a regular expression, or if the value of a rule is not a kind.
        ShapeContractError: if the model has no linear layer, `mesh` is not a mesh, the
            sharding of a kernel contradicts its rule, or "auto" finds no sharded
            kernel.
        UnsupportedOverlapError: if a rule matches a layer with a custom `dot_general`,
            or an einsum that is not a dense layer.
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
    # Set after all checks, so that an error leaves the model unchanged.
    for path, replacement in chosen.items():
        layers[path].replace(replacement)
    _record_others(model, layers, chosen, axis_name)
    return model


def _finds_ranks_by_partition(mesh):
    """Returns whether the engine runs programs lowered for meshes without devices.

    The CPU engine does: it finds ranks by partition id and needs no device ids.
    """
    return all(device.platform == "cpu" for device in mesh.devices.flat)


def overlapped(model: Any) -> dict[str, str]:
    """Returns the layers of an nnx model that `ub.overlap` has overlapped, by path.

    Transformer Engine: none.

    Args:
        model: the model, an `nnx.Module`.

    Returns:
        A dictionary from paths, such as "layers.0.up", to "column" or "row".
    """
    ops = ((path, layer.op) for path, layer in _layers(model).items())
    return {path: op.kind for path, op in ops if isinstance(op, _OURS)}


def _layers(model) -> "dict[str, Layer]":
    from jax_ub._src.retrofit.nnx_layers import layers_of

    return dict(layers_of(model))


def _record_others(model, layers, chosen, axis_name):
    """Records parameters sharded over the axis that `overlap` did not overlap.

    `ub.fallbacks` lists them.
    """
    from jax_ub._src.retrofit.nnx_layers import sharded_parameters

    by_node = {id(layer.node): path for path, layer in layers.items()}
    for path, module, spec in sharded_parameters(model, axis_name):
        layer = by_node.get(id(module))
        # `_without_kept` has recorded layers that a user or library has changed. Layers
        # of jax_ub.flax overlap without `ub.overlap`.
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
        lowering_log.record_fallback(f"overlap({shown(path)})", reason)


def check_rules(argument: str, rules: Any) -> Mapping:
    """Checks that `rules` is a dictionary; returns an empty one for None.

    Raises:
        UnknownNameError: if `rules` is not a dictionary.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise UnknownNameError(
            f"overlap: {argument} = {shown(rules)} is not a dictionary. Pass, for "
            'example, {r".*\\.up": ...} to go by path.'
        )
    return rules or {}


def _names(ub_names, paths) -> dict[str, str]:
    """Maps layer paths to the layer names that the argument `ub_names` gives."""
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
    """Maps layer paths to "column" or "row", as the layers' kernels are sharded."""
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
    """Maps layer paths to "column" or "row", as the user's `rules` say."""
    found: dict[str, str | None] = {}
    for pattern, kind in rules.items():
        resolved = None if kind is None else resolve_kind("overlap", kind)
        for path in _matching(f"the rule {shown(pattern)}", pattern, paths):
            found.setdefault(path, resolved)
    return {path: kind for path, kind in found.items() if kind is not None}


def _without_kept(layers, kinds) -> dict[str, str]:
    """Drops layers whose product function a user or library has replaced.

    They stay as they are, and are recorded as fallbacks.
    """
    found = {}
    for path, kind in kinds.items():
        kept = layers[path].why_kept()
        if kept is None:
            found[path] = kind
        else:
            lowering_log.record_fallback(
                f"overlap({shown(path)})", f"the layer {kept[0]}"
            )
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
    """Compiles the regular expression that selects layers by their path.

    Raises:
        UnknownNameError: if `pattern` is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UnknownNameError(
            f"overlap: the rule {shown(pattern)} is no regular expression: {error}. "
            "Escape what is meant as it stands, for example with re.escape(path)."
        ) from error
