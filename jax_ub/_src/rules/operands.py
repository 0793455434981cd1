"""Operands of linear layers: checks, dtypes, and mesh axes over which they vary.

An operand may be FP8, a `ScaledArray`. A `main_grad` is the f32 array to which a wgrad
adds a kernel's gradient. Its cotangent is its new value: the old value plus the
gradient.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ub._src import checks as shapes
from jax_ub._src import dtypes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.claims import claim
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.scaled_array import (
    MXFP8_BLOCK,
    ScaledArray,
    is_scaled,
    source_of,
    values_of,
)


def as_tuple(
    label: str, name: str, value: Any, is_tuple: bool, length: int
) -> tuple[Any, ...] | None:
    """Converts an argument with one array per kernel, such as biases, to a tuple.

    None stays None.
    """
    if value is None:
        return None
    if isinstance(value, tuple) != is_tuple or (is_tuple and len(value) != length):
        found = "one array" if hasattr(value, "shape") else f"a {type(value).__name__}"
        found += f" of {len(value)}" if isinstance(value, tuple) else ""
        wanted = f"a tuple of {length} kernels" if is_tuple else "one kernel"
        raise ShapeContractError(
            f"{label}: {name} is {found}, but w is {wanted}. Pass one {name} for each "
            "kernel, in the same order."
        )
    return value if is_tuple else (value,)


def check_operands(config: CallConfig, x, ws, biases, residual, out_dtype) -> np.dtype:
    """Checks shapes and dtypes of a layer's operands; returns the result's dtype."""
    label, op = config.label, config.mode.op
    if not ws:
        raise ShapeContractError(
            f"{label}: w is an empty tuple. Pass at least one kernel."
        )
    operands = by_name(x, ws)
    if config.fp8 is not None:  # the recipe quantizes x, and the kernels may be FP8
        have_scales(label, x=operands.pop("x"))
    have_scales(label, **operands)
    shapes.check_rank(label, "x", values_of(x))
    if_transposed = (
        "w is read as [out, in]: leave out rhs_transposed."
        if config.rhs_transposed
        else "If w is [out, in], pass rhs_transposed=True; w.T would copy it."
    )
    for i, w in enumerate(ws):
        kernel = config.kernel(values_of(w))
        if is_scaled(x) and is_scaled(w):
            check_scaled(config, x, w)
        elif is_scaled(x) or is_scaled(w):  # `scaled.quantized` checks both together
            shapes.check_float(label, **({"w": w} if is_scaled(x) else {"x": x}))
            shapes.check_kernel(label, "w", kernel)
        else:
            shapes.check_operands(label, x, kernel, takes_f64=config.takes_f64)
        shapes.check_contraction(
            label, x, kernel, config.num_ranks, config.mode.sharded, if_transposed
        )
        if op == "matmul_reduce_scatter":
            shapes.check_divides(label, x, config.num_ranks)
        shapes.check_addends(
            label,
            None if biases is None else biases[i],
            residual,
            result_shape(config, x, kernel.shape[1]),
            bias_name=config.bias_name,
            takes_f64=shapes.is_f64(x),
        )
    _check_same_scales(label, ws)
    if op == "matmul_all_reduce":
        bias = None if biases is None else biases[0]
        check_replicated(config, **{config.bias_name: bias, "residual": residual})
    return shapes.check_out_dtype(label, out_dtype, result_dtype(x, ws))


def result_shape(config: CallConfig, x: Any, features: int) -> tuple[int, ...]:
    """Returns the shape of one rank's result, whose last dimension is `features`."""
    if x.ndim == 1:
        return (features,)
    *lead, rows, _ = x.shape
    if config.mode.gathers_x:
        rows *= config.num_ranks
    if config.mode.op == "matmul_reduce_scatter":
        rows //= config.num_ranks
    return (*lead, rows, features)


def result_sharding(config: CallConfig, x: Any, w: Any) -> NamedSharding:
    """Returns the explicit sharding of `x @ w`: rows like x, features like w.

    An axis that shards both shards only the rows.
    """
    of_x, of_w = (jax.typeof(values_of(a)).sharding for a in (x, w))
    rows = of_x.spec[:-1]
    features = shapes.axis_tuple(of_w.spec[0 if config.rhs_transposed else 1])
    used = {axis for entry in rows for axis in shapes.axis_tuple(entry)}
    kept = tuple(axis for axis in features if axis not in used)
    return (of_x if used else of_w).update(spec=PartitionSpec(*rows, kept or None))


def check_replicated(config: CallConfig, **addends: jax.Array | None) -> None:
    """Raises an error if a bias or residual of an all-reduce varies over the ranks."""
    for name, addend in addends.items():
        if config.varying(addend):
            raise ShapeContractError(
                f"{config.label}: {name} varies over {config.axis_name}, but it is "
                "added once, after the reduction, so it must be the same on every "
                "rank. Pass it replicated: leave the axis out of its in_specs."
            )


def as_row(x: Any) -> Any:
    """Returns a vector as a matrix with one row. The vector may be FP8."""
    return jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, x)


def have_scales(label: str, **operands: Any) -> bool:
    """Returns whether all operands of a GEMM are FP8; raises if only some are."""
    for name, operand in operands.items():
        if is_scaled(operand):  # `jax.tree.map` may have replaced its arrays
            shapes.check_array(label, name, operand.values)
            shapes.check_array(label, f"{name}.scales", operand.scales)
        if shapes.is_array(operand) and operand.dtype in dtypes.FP8:
            raise ShapeContractError(
                f"{label}: {name} is {operand.dtype} without scales. Pass ub.quantize("
                f"{name}, recipe), or ub.ScaledArray(values, scales)."
            )
    wide = [name for name, operand in operands.items() if not is_scaled(operand)]
    if len(wide) in (0, len(operands)):
        return not wide
    fp8 = next(name for name in operands if name not in wide)
    found = operands[wide[0]]
    dtype = found.dtype if shapes.is_array(found) else type(found).__name__
    raise ShapeContractError(
        f"{label}: {fp8} is FP8, {wide[0]} is {dtype}. Quantize both or neither."
    )


def by_name(x: Any, ws: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the operands as a dict by name. Several kernels are "w[0]", "w[1]"..."""
    names = ["w"] if len(ws) == 1 else [f"w[{i}]" for i in range(len(ws))]
    return {"x": x, **dict(zip(names, ws, strict=True))}


def result_dtype(x: Any, ws: tuple[Any, ...]) -> np.dtype:
    """Returns the default dtype of a layer's result, the dtype of x.

    For FP8 operands it is the dtype from which the first of them was quantized, or bf16
    if that is not known.
    """
    if not is_scaled(x):
        return x.dtype
    sources = [source for source in map(source_of, (x, *ws)) if source is not None]
    return sources[0].dtype if sources else jnp.dtype(jnp.bfloat16)


def with_dtypes(config: CallConfig, x: Any, ws: tuple, out_dtype) -> CallConfig:
    """Returns `config` with the dtypes of operands, result and gradients."""
    config = config.with_dtypes(result_dtype(x, ws), out_dtype)
    if not is_scaled(x):
        return config
    sources = tuple(
        None if operand.source is None else operand.source.dtype for operand in (x, *ws)
    )
    known = [dtype for dtype in sources[1:] if dtype is not None]
    dw_dtype = jnp.result_type(*known) if known else None
    return dataclasses.replace(config, source_dtypes=sources, dw_dtype=dw_dtype)


def check_scaled(config: CallConfig, x: ScaledArray, w: ScaledArray) -> None:
    """Raises an error if scales or formats of FP8 operands do not fit the layer.

    The caller checks that both have the same K.
    """
    label = config.label
    shapes.check_kernel(label, "w", w)
    shapes.check_not_empty(label, "x", x)
    x_axis, w_axis = x.ndim - 1, config.contracted_dim
    check_layout(label, "x", x, x_axis)
    check_layout(label, "w", w, w_axis)
    check_formats(label, x=x, w=w)
    if config.shards is not None:
        _check_agreed(label, "w", w, w_axis, config.shards.axes)
    if config.num_ranks == 1 or config.mode.op == "matmul":
        return
    _check_agreed(label, "x", x, x_axis, config.axis_name)
    if not config.mode.gathers_x:
        _check_agreed(label, "w", w, w_axis, config.axis_name)


def check_formats(label: str, **operands: Any) -> None:
    """Raises an error if both operands are float8_e5m2, which no device multiplies."""
    if all(operand.dtype == jnp.float8_e5m2 for operand in operands.values()):
        raise ShapeContractError(
            f"{label}: {' and '.join(operands)} are both float8_e5m2, which no device "
            "multiplies. Make one of them float8_e4m3fn; for gradients use a HYBRID "
            "recipe."
        )


def _check_same_scales(label, ws):
    """Raises an error if only some of several FP8 kernels have block scales."""
    first = ws[0]
    for i, w in enumerate(ws):
        if is_scaled(w) and is_scaled(first) and w.scales.dtype != first.scales.dtype:
            raise ShapeContractError(
                f"{label}: w[0] has {first.scales.dtype} scales, but w[{i}] has "
                f"{w.scales.dtype} scales. Quantize all kernels of a call by the same "
                "recipe."
            )


def check_layout(label: str, name: str, operand: Any, contracted: int) -> None:
    """Raises an error if scales of rows or blocks change along another axis.

    Those of rows do not change along the axis `contracted` of the forward pass, and
    blocks are along it.
    """
    if operand.scaling == "tensor":
        return
    is_block = operand.scaling == "block"
    size = operand.shape[contracted] // MXFP8_BLOCK if is_block else 1
    wanted = _scales_shape(operand, contracted, size)
    if operand.scales.shape != wanted:
        kind = f"block of {MXFP8_BLOCK}" if is_block else "row or column"
        raise ShapeContractError(
            f"{label}: {name} has scales of shape {operand.scales.shape} for values "
            f"{operand.shape}, but one per {kind} has shape {wanted}, since "
            f"axis {contracted} is contracted. Quantize {name} with its role, such as "
            'role="kernel".'
        )


def _scales_shape(operand, contracted, size):
    """Returns the operand's shape with `size` in place of the contracted dimension."""
    return (*operand.shape[:contracted], size, *operand.shape[contracted + 1 :])


def is_per_row(operand, contracted):
    """Returns whether each row of x, or column of a kernel, has its own FP8 scale.

    The result is also True for a scale per tensor if there is only one row or column.
    """
    return operand.scales.shape == _scales_shape(operand, contracted, 1)


def _check_agreed(label, name, operand, contracted, axes):
    """Raises an error if ranks that share an FP8 tensor have different scales for it.

    `axes` are the mesh axes of these ranks. Without `jax.shard_map(check_vma=True)` it
    is unknown whether the scale differs.
    """
    differs = vma.axes_of(operand.scales).intersection(axes)
    if differs and operand.scaling == "tensor" and not is_per_row(operand, contracted):
        raise ShapeContractError(
            f"{label}: {name} has one scale per tensor, which differs over "
            f"{tuple(sorted(differs))}. Pass axis_name to ub.quantize."
        )


def pcast_operands(tree: Any, axes: Any) -> Any:
    """Casts operands to vary over mesh axes, but not the scales of FP8 operands.

    The scales of a returned `ScaledArray` therefore keep their type.
    """

    def cast(operand):
        if not is_scaled(operand):
            return vma.pcast_varying(operand, axes)
        values, source = vma.pcast_varying((operand.values, operand.source), axes)
        return ScaledArray(values, operand.scales, source)

    return jax.tree.map(cast, tree, is_leaf=is_scaled)


def claim_main_grads(
    op: str, main_grads: Sequence[Any], ws: Sequence[jax.Array | ScaledArray]
) -> tuple[jax.Array, ...]:
    """Marks gradient accumulators as used by one call, and returns them.

    Raises:
        ShapeContractError: if an accumulator does not fit its kernel, or when JAX
            differentiates the call with respect to one that another call has used in
            this trace, or over which the `jax.lax.scan` of the call closes.
    """
    claimed = []
    for main_grad, w in zip(main_grads, ws, strict=True):
        shapes.check_main_grad(op, main_grad, w)
        claimed.append(
            claim(
                main_grad,
                f"{op}: this main_grad went into another call already, and jax would "
                "add the two accumulated values. Give every call a main_grad of its "
                "own.",
                f"{op}: jax.lax.scan closes over this main_grad, and jax would add the "
                "accumulated values of all iterations. Differentiate inside the loop, "
                "and carry the main_grad.",
            )
        )
    return tuple(claimed)


def pcast_main_grad(op: str, main_grad: jax.Array, axes) -> jax.Array:
    """Raises an error if `main_grad` is shared by ranks whose gradients differ.

    The gradient that is added to it varies over the mesh axes `axes`.

    Returns:
        The main_grad, cast to vary over the axes that have one rank.
    """
    # Over axes of size 1, the cast changes no gradient, because its transpose is a sum
    # over a single rank.
    new = frozenset(axes) - vma.axes_of(main_grad)
    single = [axis for axis in new if lax.axis_size(axis) == 1]
    missing = sorted(new.difference(single))
    if missing:
        raise ShapeContractError(
            f"{op}: main_grad is the same on all ranks of {missing}, but this call's "
            "gradient is not. Let every rank accumulate its own, jax.lax.pcast("
            f"main_grad, {tuple(missing)}, to='varying'), and sum them over "
            f"{tuple(missing)} after the last microbatch."
        )
    return vma.pcast_varying(main_grad, single)


def check_vmapped_together(op: str, main_grad: jax.Array, dy: jax.Array) -> jax.Array:
    """Raises an error if `jax.vmap` maps dy but not main_grad; returns main_grad.

    Otherwise JAX would sum the accumulated values of all mapped indices, and each of
    them would contain main_grad. The check adds nothing to the compiled program.
    """

    def text(size):
        return (
            f"{op}: jax.vmap over {size} examples maps the gradient that main_grad "
            f"accumulates, but not main_grad, and would count it {size} times. Put the "
            "examples into batch axes of x, in front of its rows, without jax.vmap; or "
            "map main_grad too, and sum what each example accumulates."
        )

    return shapes.mapped_with(main_grad, dy, text)
