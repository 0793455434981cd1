"""Helpers for `custom_vjp` rules with symbolic zeros and optional residuals."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ub._src.primitives import varying


def promote(operands, axes):
    """Casts all arrays in `operands` to vary over the mesh axes `axes` of `shard_map`.

    It is called outside the `custom_vjp`, so that JAX sums the gradients over the new
    axes.
    """
    return jax.tree.map(lambda operand: varying.promote(operand, axes), operands)


def save(value, name: str, ub_name: str | None = None):
    """Names an array with `checkpoint_name`, for the policies of `jax.checkpoint`.

    None stays None.

    With a `ub_name` the value has two names, such as "jax_ub.y" and "jax_ub.qkv.y", so
    that a policy can select the values of all calls or of one.
    """
    if value is None:
        return None
    value = checkpoint_name(value, f"jax_ub.{name}")
    if ub_name is None:
        return value
    return checkpoint_name(value, f"jax_ub.{ub_name}.{name}")


def jitted_rule(rule: Callable, static_argnums) -> Callable:
    """Jits a `custom_vjp` function so that it also works in an eager `shard_map`.

    The function uses symbolic zeros.

    JAX cannot evaluate one there operation by operation, so the rule is always jitted,
    even under `jax.disable_jit`. Inside a traced program the jit is inlined.
    """
    jitted = jax.jit(rule, static_argnums=static_argnums, inline=True)

    def run(*operands):
        with jax.disable_jit(False):
            return jitted(*operands)

    return run


def residual_or_placeholder(wanted: bool, value):
    """Returns `value` if the backward pass needs it, else empty arrays like it.

    The empty arrays, called placeholders, keep the residuals' tree structure.

    JAX stores one tree structure of residuals per jaxpr, although each use of the jaxpr
    may be differentiated with respect to different operands. So an omitted residual
    must not change the structure. A placeholder is a slice of the value that it
    replaces, so that `jax.vmap` maps both over the same axes.
    """
    return value if wanted else jax.tree.map(_emptied, value)


def _emptied(value):
    rows = value if value.ndim else value[None]
    return lax.slice_in_dim(rows, 0, 0).astype(bool)


def placeholder() -> jax.Array:
    """Returns an empty array that stands for a residual that is not saved."""
    return jnp.zeros(0, bool)


def present_residuals(residuals: dict) -> dict:
    """Replaces the placeholders in a dictionary of residuals by None."""
    return {
        name: None if any(map(is_placeholder, jax.tree.leaves(value))) else value
        for name, value in residuals.items()
    }


def is_placeholder(leaf) -> bool:
    """Returns whether an array is the empty stand-in for a residual not saved.

    An empty array of booleans counts as one, too; it holds no information either.
    """
    return leaf.dtype == bool and leaf.size == 0


def value_of(tree):
    """Returns the arrays in operands that `defvjp(symbolic_zeros=True)` has wrapped.

    The structure of nested tuples is kept, and None stays None.
    """
    if isinstance(tree, tuple):
        return tuple(value_of(leaf) for leaf in tree)
    return None if tree is None else tree.value


def needs(tree) -> bool:
    """Returns whether JAX needs the gradient of any operand in a forward rule.

    The operands are wrapped as by `defvjp(symbolic_zeros=True)`.
    """
    if isinstance(tree, tuple):
        return any(needs(leaf) for leaf in tree)
    return tree is not None and tree.perturbed


def needs_dw(w, main_grad) -> bool:
    """Returns whether the backward pass must compute the kernel's gradient.

    With a `main_grad` the kernel's gradient is accumulated there, so only whether
    main_grad is differentiated counts. The callers do not apply stop_gradient to `w`
    instead, because a scan over layers would save its result as another residual,
    whereas it reuses the kernels themselves.
    """
    return needs(w if main_grad is None else main_grad)


def is_zero(cotangent) -> bool:
    """Returns whether a cotangent is a symbolic zero or None, which needs no GEMM."""
    return cotangent is None or isinstance(cotangent, SymbolicZero)
