"""What the rules share of `custom_vjp`: wrapped operands, residuals, and running it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ub.primitives import varying


def promote(operands, axes):
    """Promotes a tree of operands outside the rule: JAX then sums their gradients."""
    return jax.tree.map(lambda operand: varying.promote(operand, axes), operands)


def save(value, name: str, ub_name: str | None = None):
    """Names what the policies of `jax.checkpoint` may save; None stays None.

    The value of a named call has two names, "jax_ub.y" and "jax_ub.qkv.y", so that a
    policy can choose all calls or one.
    """
    if value is None:
        return None
    value = checkpoint_name(value, f"jax_ub.{name}")
    if ub_name is None:
        return value
    return checkpoint_name(value, f"jax_ub.{ub_name}.{name}")


def jitted_rule(rule: Callable, static_argnums) -> Callable:
    """Lets a rule run in a `shard_map` that nothing compiles, also for want of jit.

    jax cannot run a custom_vjp with symbolic zeros there, one operation at a time. In a
    program that is traced as a whole this changes nothing.
    """
    jitted = jax.jit(rule, static_argnums=static_argnums, inline=True)

    def run(*operands):
        with jax.disable_jit(False):
            return jitted(*operands)

    return run


def residual_or_placeholder(wanted: bool, value):
    """A residual, or placeholders in a tree of the same structure.

    jax keeps one tree of residuals for all uses of a jaxpr, which may be differentiated
    for other operands each time, so what is left out must not change the structure. Nor
    along which axes `jax.vmap` maps it: a placeholder is made of the value it is for.
    """
    return value if wanted else jax.tree.map(_emptied, value)


def _emptied(value):
    rows = value if value.ndim else value[None]
    return lax.slice_in_dim(rows, 0, 0).astype(bool)


def placeholder() -> jax.Array:
    """What stands where a residual was left out: an array without a number."""
    return jnp.zeros(0, bool)


def present_residuals(residuals: dict) -> dict:
    """The residuals by name, None where only placeholders were kept."""
    return {
        name: None if any(map(is_placeholder, jax.tree.leaves(value))) else value
        for name, value in residuals.items()
    }


def is_placeholder(leaf) -> bool:
    """Whether a residual is a `placeholder`.

    A residual of booleans without an element looks the same, and says as little.
    """
    return leaf.dtype == bool and leaf.size == 0


def value_of(tree):
    """The values of operands as `custom_vjp(symbolic_zeros=True)` wraps them."""
    if isinstance(tree, tuple):
        return tuple(value_of(leaf) for leaf in tree)
    return None if tree is None else tree.value


def needs(tree) -> bool:
    """Whether a gradient is wanted for any of the wrapped operands."""
    if isinstance(tree, tuple):
        return any(needs(leaf) for leaf in tree)
    return tree is not None and tree.perturbed


def needs_dw(w, main_grad) -> bool:
    """Whether the gradient of a kernel is wanted, which goes to its main_grad, if any.

    Not by way of stop_gradient(w): a scan over layers would save what that returns,
    where it takes the kernels themselves.
    """
    return needs(w if main_grad is None else main_grad)


def is_zero(cotangent) -> bool:
    """Whether a cotangent is known to be zero, so that its GEMMs can be left out."""
    return cotangent is None or isinstance(cotangent, SymbolicZero)
