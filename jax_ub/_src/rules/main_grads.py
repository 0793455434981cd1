"""Checks of `main_grad`, the f32 array to which a wgrad adds a kernel's gradient.

The cotangent of a main_grad is its new value: the old value plus the gradient.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import get_opaque_trace_state

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.primitives import vma

# The main_grads (gradient accumulators) and FP8 states that calls have used. The key is
# the id of a tracer; the value is a weak reference to the tracer, and the trace in
# which it was used. An entry is removed when its tracer is freed.
_USED: dict[int, tuple[weakref.ref, object]] = {}


def claim(op: str, main_grads: Sequence[Any] | None, ws: Sequence[jax.Array]) -> None:
    """Raises an error if a gradient accumulator does not fit its kernel, or is reused.

    Each call in a JAX trace needs a separate main_grad.
    """
    for main_grad, w in zip(main_grads or (), ws, strict=False):
        shapes.check_main_grad(op, main_grad, w)
        if _is_used(main_grad):
            raise ShapeContractError(
                f"{op}: this main_grad went into another call already, and jax would "
                "add the two accumulated values. Give every call a main_grad of its "
                "own, or carry one through jax.lax.scan."
            )


def claim_state(op: str, state: Any) -> None:
    """Raises an error if another call has used this FP8 state in the same JAX trace."""
    if any([_is_used(array) for array in jax.tree.leaves(state)]):
        raise ShapeContractError(
            f"{op}: this FP8 state went into another call already, and jax would add "
            "the two new states. Give every call a state of its own, or carry one "
            "through jax.lax.scan."
        )


def _is_used(array):
    """Returns whether a call has used the array in this trace. Marks it as used."""
    if not isinstance(array, jax.core.Tracer):
        return False
    key, here = id(array), get_opaque_trace_state(convention="flax")
    known = _USED.get(key)
    _USED[key] = (weakref.ref(array, lambda _: _USED.pop(key, None)), here)
    return known is not None and known[0]() is array and known[1] == here


def pcast_varying(op: str, main_grad: jax.Array, axes) -> jax.Array:
    """Raises an error if `main_grad` is shared by ranks whose gradients differ.

    The gradient that is added to it varies over the mesh axes `axes`.

    Returns:
        The main_grad, cast to vary over the axes that have one rank.
    """
    # A cast to varying over axes of size 1 changes no gradient: its transpose is a sum
    # over one rank.
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
