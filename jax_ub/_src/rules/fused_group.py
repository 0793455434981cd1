"""`fused_group`: gives a group of operations a joint `custom_vjp` rule."""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_ub._src.primitives import varying
from jax_ub._src.rules.vjp import is_placeholder, is_zero, jitted_rule, placeholder
from jax_ub._src.runtime import registry


class Group(Protocol):
    """The forward and backward functions of several operations that run as one.

    Both are pure functions of `operands`, any tree of arrays. A group is hashable and
    equal on all ranks. `cotangent_avals` is a tree of the same structure: `like(x)` for
    an operand x whose gradient is needed, None for any other operand.
    """

    def forward(
        self, operands: Any, cotangent_avals: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Computes the group's results, and the residuals for its backward pass.

        The tree structure of the residuals depends on the operands only: a residual
        that the needed gradients do not use is replaced by `vjp.placeholder`.
        """

    def backward(
        self, residuals: dict[str, Any], cotangents: Any, cotangent_avals: Any
    ) -> Any:
        """Computes the gradients of the operands; None for those not needed.

        Args:
            residuals: residuals from `forward`, with None in place of placeholders.
            cotangents: cotangents of the results; None for one that is known to be
                zero.
            cotangent_avals: the same tree as in `forward`.
        """


def fused_group(group: Group, operands: Any) -> Any:
    """Runs a group of operations, and uses its backward function as derivative.

    Args:
        group: the group to run.
        operands: a tree of arrays.

    Returns:
        The results of `group.forward`.
    """
    # The configuration is part of jit's cache key, because the operations look up names
    # and methods in it while they are traced.
    return _compiled_group(registry.configuration(), group, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _group(configuration, group, operands):
    return group.forward(operands, jax.tree.map(lambda _: None, operands))[0]


def _group_fwd(configuration, group, operands):
    values = jax.tree.map(lambda operand: operand.value, operands)
    cotangent_avals = jax.tree.map(
        lambda operand: like(operand.value) if operand.perturbed else None, operands
    )
    results, residuals = group.forward(values, cotangent_avals)
    return results, (
        jax.tree.map(_placed, cotangent_avals, is_leaf=_is_none),
        residuals,
    )


def _group_bwd(configuration, group, saved, cotangents):
    cotangent_avals, residuals = jax.tree.map(
        lambda leaf: None if is_placeholder(leaf) else leaf, saved
    )
    cotangents = jax.tree.map(lambda ct: None if is_zero(ct) else ct, cotangents)
    gradients = group.backward(residuals, cotangents, cotangent_avals)
    return (
        jax.tree.map(to_cotangent_aval, cotangent_avals, gradients, is_leaf=_is_none),
    )


def _placed(leaf):
    return placeholder() if leaf is None else leaf


def _is_none(leaf):
    return leaf is None


_group.defvjp(_group_fwd, _group_bwd, symbolic_zeros=True)
_compiled_group = jitted_rule(_group, static_argnums=(0, 1))


def like(value) -> jax.Array:
    """Returns an empty array that records the dtype and varying axes of `value`."""
    empty = jnp.zeros((0,), value.dtype)
    return varying.promote(empty, varying.axes_of(value))


def aval_or_placeholder(wanted: bool, value) -> jax.Array:
    """Returns `like(value)` if the gradient is `wanted`; otherwise a placeholder.

    A value of None gives a placeholder, too. A placeholder keeps the residuals'
    tree structure independent of what is wanted.
    """
    return like(value) if wanted and value is not None else placeholder()


def to_cotangent_aval(
    wanted: jax.Array | None, gradient: jax.Array | None
) -> jax.Array | None:
    """Converts a gradient to the dtype and varying axes that its operand has.

    A gradient that varies over more mesh axes belongs to an operand that was promoted
    to those axes. The transpose of the promotion is a sum, which is computed here.

    Args:
        wanted: `like` the operand; None if its gradient is not needed.
        gradient: the gradient of the operand, or None.
    """
    if wanted is None or gradient is None:
        return None
    axes = varying.axes_of(wanted)
    extra = tuple(sorted(varying.axes_of(gradient) - axes))
    if extra:
        gradient = varying.sum_over(extra, gradient)
    return varying.promote(gradient.astype(wanted.dtype), axes)
