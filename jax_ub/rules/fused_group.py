"""One custom_vjp for a group of operations whose forward and backward are fused."""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_ub.primitives import varying
from jax_ub.rules.vjp import is_placeholder, is_zero, jitted_rule, placeholder
from jax_ub.runtime import overlaps


class Group(Protocol):
    """Pure functions of operands, hashable, the same on every rank.

    `operands` is any tree of arrays, and `likes` the tree beside it that says which
    gradients are wanted: what is `like` the operand for one, None for another.
    """

    def forward(
        self, operands: Any, cotangent_avals: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the results, and residuals for the wanted gradients, by name.

        The tree of the residuals depends on the operands only. In the place of what is
        not needed is a `vjp.placeholder`.
        """

    def backward(
        self, residuals: dict[str, Any], cotangents: Any, cotangent_avals: Any
    ) -> Any:
        """Returns a tree of gradients like the operands, None where there is none.

        Args:
            residuals: as the forward returned them, None for what it left out.
            cotangents: of the results, None for one that is known to be zero.
            cotangent_avals: as in the forward.
        """


def fused_group(group: Group, operands: Any) -> Any:
    """Runs the group's forward; its derivative is the group's backward.

    Args:
        group: what to run.
        operands: a tree of arrays.

    Returns:
        The results, as the group's forward returns them.
    """
    # The operations look up names and methods while they are traced.
    return _compiled_group(overlaps.configuration(), group, operands)


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
    """An empty array with the dtype and the mesh axes of an array or aval."""
    empty = jnp.zeros((0,), value.dtype)
    return varying.promote(empty, varying.axes_of(value))


def aval_or_placeholder(wanted: bool, value) -> jax.Array:
    """The type of an array or aval where it is wanted, a placeholder elsewhere."""
    return like(value) if wanted and value is not None else placeholder()


def to_cotangent_aval(
    wanted: jax.Array | None, gradient: jax.Array | None
) -> jax.Array | None:
    """Makes a gradient one of a value that is `like` wanted: its dtype and its axes.

    What varies over an axis that the value does not was promoted on its way; the
    transpose of that is a sum.
    """
    if wanted is None or gradient is None:
        return None
    axes = varying.axes_of(wanted)
    extra = tuple(sorted(varying.axes_of(gradient) - axes))
    if extra:
        gradient = varying.sum_over(extra, gradient)
    return varying.promote(gradient.astype(wanted.dtype), axes)
