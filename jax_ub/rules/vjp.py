"""Helpers for `custom_vjp` with symbolic zeros: operands, residuals and jit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ub.primitives import varying


def promote(operands, axes):
    """Casts a tree of operands to vary over the mesh axes `axes`.

    It is called outside the `custom_vjp`, so that JAX sums the gradients over the new
    axes.
    """
    return jax.tree.map(lambda operand: varying.promote(operand, axes), operands)


def save(value, name: str, ub_name: str | None = None):
    """Names a value for the policies of `jax.checkpoint`; None stays None.

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
    """Works around `custom_vjp` with symbolic zeros inside an eager `shard_map`.

    JAX cannot evaluate one there operation by operation, so the rule is always jitted,
    even under `jax.disable_jit`. Inside a traced program the jit is inlined.
    """
    jitted = jax.jit(rule, static_argnums=static_argnums, inline=True)

    def run(*operands):
        with jax.disable_jit(False):
            return jitted(*operands)

    return run


def residual_or_placeholder(wanted: bool, value):
    """Returns a residual, or a tree of placeholders with the residual's structure.

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
    """Returns an empty array that replaces a residual that is not needed."""
    return jnp.zeros(0, bool)


def present_residuals(residuals: dict) -> dict:
    """Returns the residuals by name, with None in place of placeholders."""
    return {
        name: None if any(map(is_placeholder, jax.tree.leaves(value))) else value
        for name, value in residuals.items()
    }


def is_placeholder(leaf) -> bool:
    """Returns whether a residual is a `placeholder`.

    An empty array of booleans counts as one, too; it holds no information either.
    """
    return leaf.dtype == bool and leaf.size == 0


def value_of(tree):
    """Unwraps the operands of a forward rule of `defvjp(symbolic_zeros=True)`."""
    if isinstance(tree, tuple):
        return tuple(value_of(leaf) for leaf in tree)
    return None if tree is None else tree.value


def needs(tree) -> bool:
    """Returns whether any of the wrapped operands is differentiated."""
    if isinstance(tree, tuple):
        return any(needs(leaf) for leaf in tree)
    return tree is not None and tree.perturbed


def needs_dw(w, main_grad) -> bool:
    """Returns whether the wgrad is needed.

    With a `main_grad` the kernel's gradient is accumulated there, so only whether
    main_grad is differentiated counts. The callers do not apply stop_gradient to `w`
    instead, because a scan over layers would save its result as another residual,
    whereas it reuses the kernels themselves.
    """
    return needs(w if main_grad is None else main_grad)


def is_zero(cotangent) -> bool:
    """Returns whether a cotangent is known to be zero; its GEMMs can be skipped."""
    return cotangent is None or isinstance(cotangent, SymbolicZero)
