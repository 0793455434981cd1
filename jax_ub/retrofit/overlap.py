"""Overlap for an unmodified nnx model, in one line."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_ub.errors import ShapeContractError, UnknownNameError, nearest
from jax_ub.retrofit.dot_general import DotGeneral, dot_general
from jax_ub.retrofit.placement import kind_of_spec, resolve_kind


def overlap(
    model: Any,
    rules: Mapping[str, str | None] | str = "auto",
    *,
    axis_name: str = "tp",
    mesh: jax.sharding.Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
) -> Any:
    """Overlaps the linear layers of an unmodified `flax.nnx` model.

        model = ub.overlap(model)
        model = ub.overlap(model, {r".*\\.(q|k|v|up)_proj": "column", r".*\\.o": "row"})

    Sets the `dot_general` of its `nnx.Linear` and `nnx.LinearGeneral` layers, in place;
    parameters are left as they are. Calling it again replaces what it set before.
    `overlapped` lists the result.

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
        UnknownNameError: if a rule matches no layer, or names no kind.
        ShapeContractError: if a kernel is sharded the other way than its rule says, or
            "auto" finds no sharded kernel.
    """
    layers = dict(_linear_layers(model))
    specs = {path: _spec(layer.kernel) for path, layer in layers.items()}
    if rules == "auto":
        kinds = {
            path: kind_of_spec(specs[path], _num_in(layer), axis_name)
            for path, layer in layers.items()
        }
        if not any(kinds.values()):
            raise ShapeContractError(_nothing_sharded(list(layers), axis_name))
    else:
        kinds = _match(rules, list(layers))
    chosen = {}
    for path, kind in kinds.items():
        if kind is None:
            continue
        chosen[path] = dot_general(
            kind,
            axis_name=axis_name,
            mesh=mesh if mesh is not None else _mesh(layers[path].kernel),
            method=method,
            sequence_parallel=sequence_parallel,
            data_axes=data_axes,
            ub_name=path,
        )
        chosen[path].placement.check_kernel_spec(specs[path], _num_in(layers[path]))
    for path, replacement in chosen.items():
        layers[path].dot_general = replacement
    return model


def overlapped(model: Any) -> dict[str, str]:
    """Lists the layers that `overlap` reached: {path: "column" or "row"}."""
    return {
        path: layer.dot_general.placement.parallel
        for path, layer in _linear_layers(model)
        if isinstance(layer.dot_general, DotGeneral)
    }
