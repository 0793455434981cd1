"""The contract of `main_grad`: an accumulator whose cotangent is its new value."""

import weakref

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import get_opaque_trace_state

from jax_ub import shapes
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub.primitives import varying

# id of a tracer -> (a weak reference to it, the trace it was used in). Entries vanish
# with their tracers.
_USED: dict[int, tuple[weakref.ref, object]] = {}


def prepare(
    op: str, main_grad: jax.Array | None, w: jax.Array, axes
) -> jax.Array | None:
    """Checks one main_grad, if there is one, and claims it for this call.

    Args:
        op: the op's label.
        main_grad: the accumulator, f32 `[K, N]`, or None.
        w: its kernel.
        axes: the mesh axes that the kernel's gradient varies over.

    Raises:
        ShapeContractError: if its shape, its dtype or its mesh axes do not fit, or if
            it was handed to another call already.
    """
    if main_grad is None:
        return None
    claim(op, main_grad, w)
    return promote(op, main_grad, axes)


def claim(op: str, main_grad: jax.Array, w: jax.Array) -> None:
    """Checks shape and dtype of a main_grad, and that no other call has it.

    Raises:
        ShapeContractError: if they do not fit, or another call has it already.
    """
    shapes.check_main_grad(op, main_grad, w)
    _claim(op, main_grad)


def promote(op: str, main_grad: jax.Array, axes) -> jax.Array:
    """Checks that a main_grad varies over all mesh axes that its gradient does.

    Raises:
        ShapeContractError: if it is the same on ranks whose gradients differ.
    """
    main_grad = _promote_over_single_ranks(main_grad, axes)
    missing = sorted(frozenset(axes) - varying.axes_of(main_grad))
    if missing:
        raise ShapeContractError(
            f"{op}: main_grad is the same on all ranks of {missing}, but this call's "
            "gradient is not. Let every rank accumulate its own, jax.lax.pcast("
            f"main_grad, {tuple(missing)}, to='varying'), and sum them over "
            f"{tuple(missing)} after the last microbatch."
        )
    return main_grad


def _promote_over_single_ranks(main_grad, axes):
    # The sum over an axis of one rank is the value itself: promotion changes nothing.
    single = [
        axis
        for axis in frozenset(axes) - varying.axes_of(main_grad)
        if lax.axis_size(axis) == 1
    ]
    return varying.promote(main_grad, single)


def check_vmapped_together(op: str, main_grad: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns main_grad, which is mapped by every `jax.vmap` that maps its gradient.

    BackgroundLoad JAX would sum what each index accumulates, with a main_grad in each
    of them. In the compiled program this is nothing.

    Args:
        op: the op's label.
        main_grad: the accumulator.
        dy: what its gradient is made of.

    Raises:
        UnsupportedOverlapError: once it is known that it is not.
    """

    @custom_vmap
    def same(main_grad, dy):
        return main_grad

    @same.def_vmap
    def same_of_mapped(axis_size, is_mapped, main_grad, dy):
        if is_mapped[1] and not is_mapped[0]:
            raise UnsupportedOverlapError(
                f"{op}: jax.vmap over {axis_size} examples maps the gradient that "
                "main_grad accumulates, but not main_grad, and would count it "
                f"{axis_size} times. Put the examples into batch axes of x, in front "
                "of its rows, without jax.vmap; or map main_grad too, and sum what "
                "each example accumulates."
            )
        # Anew, for the jax.vmap around this one.
        return same(main_grad, dy), is_mapped[0]

    return same(main_grad, dy)


def _claim(op, main_grad):
    if not isinstance(main_grad, jax.core.Tracer):
        return
    key, here = id(main_grad), get_opaque_trace_state(convention="flax")
    known = _USED.get(key)
    if known is not None and known[0]() is main_grad and known[1] == here:
        raise ShapeContractError(
            f"{op}: this main_grad went into another call already, and jax would add "
            "the two accumulated values. Give every call a main_grad of its own, or "
            "carry one through jax.lax.scan."
        )
    _USED[key] = (weakref.ref(main_grad, lambda _: _USED.pop(key, None)), here)
