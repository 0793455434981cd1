"""Checks that an array whose cotangent is its new value belongs to a single call.

Such arrays are gradient accumulators ("main_grad") and FP8 states. JAX sums the
cotangents of an array that several calls use, or one call in each iteration of a loop,
and the sum is not the new value.
"""

import functools
import weakref

import jax
from jax.extend.core import get_opaque_trace_state, take_current_trace

from jax_ub._src.errors import ShapeContractError

# The arrays that calls have used. The key is the id of a tracer; the value is a weak
# reference to the tracer, and the trace that uses it. The entry of a tracer is removed
# when the tracer is freed.
_USED: dict[int, tuple[weakref.ref, object]] = {}


def claim(array: jax.Array, reused: str, looped: str) -> jax.Array:
    """Marks an array as used, so that JAX cannot differentiate a second use of it.

    Args:
        array: an array whose cotangent is its new value. A concrete array has no
            cotangent, and is not checked.
        reused: text of the error if another call has used the array in this trace.
        looped: text of the error if the call is in a `jax.lax.scan` that closes over
            the array.

    Raises:
        ShapeContractError: when JAX differentiates the call with respect to an array
            that it must not use.
    """
    if not isinstance(array, jax.core.Tracer):
        return array
    if _is_used(array):
        return _without_derivative(reused, array)
    return _without_derivative(looped, array) if _is_in_loop(array) else array


def _is_used(array):
    """Returns whether a call in this trace has used an array, and marks it as used."""
    key, here = id(array), get_opaque_trace_state(convention="flax")
    known = _USED.get(key)
    _USED[key] = (weakref.ref(array, lambda _: _USED.pop(key, None)), here)
    return known is not None and known[0]() is array and known[1] == here


def _is_in_loop(array):
    """Returns whether a scan whose body is being traced closes over a tracer.

    JAX has no public function for this. The attributes of traces read here are those of
    JAX 0.10 to 0.12; without them the result is False.
    """
    with take_current_trace() as trace:
        pass
    while trace is not None and trace is not getattr(array, "_trace", None):
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        # `jax.lax.map` is a scan, and so is a `fori_loop` that JAX can differentiate.
        if getattr(info, "traced_for", None) in ("scan", "fori_loop"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(error, array):
    """Returns the array unchanged. Its differentiation raises an error."""
    return array


@_without_derivative.defjvp
def _raise_error(error, primals, tangents):
    raise ShapeContractError(error)
