"""State of `DelayedScaling`: an amax history and a scale for each tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub._src.checks import check_array, is_array
from jax_ub._src.errors import ConfigurationError, ShapeContractError, shown
from jax_ub._src.fp8.recipes import (
    OUTPUT_GRAD,
    ROLES,
    DelayedScaling,
    Recipe,
    check_recipe,
)

SCALE, HISTORY = "scale", "amax_history"
# The keys of a layer's `DelayedScaling` state, such as "kernel_scale".
NAMES = frozenset(f"{role}_{name}" for role in ROLES for name in (SCALE, HISTORY))


def names_of(role: str) -> tuple[str, str]:
    """Returns a role's keys in an FP8 state: "kernel_scale", "kernel_amax_history"."""
    return f"{role}_{SCALE}", f"{role}_{HISTORY}"


OUTPUT_GRAD_STATE = names_of(OUTPUT_GRAD)


def init_state(recipe: Recipe) -> dict[str, jax.Array]:
    """Returns a layer's initial `DelayedScaling` state: scales and amax histories.

    Names and shapes are those of `flax.linen.fp8_ops`, so that checkpoints agree:
    "input_scale", "input_amax_history", and the same for "kernel" and "output_grad".
    A scale multiplies FP8 values. Transformer Engine stores the inverse.

    Transformer Engine: `transformer_engine.pytorch.quantization.FP8GlobalStateManager`.

    Args:
        recipe: the recipe.

    Returns:
        For `DelayedScaling` six f32 arrays by name: scales `[1]` of 1, and histories
        `[amax_history_len]` of zeros. An empty dict for the other recipes, which have
        no state.

    Raises:
        ConfigurationError: if `recipe` is not a recipe.
    """
    check_recipe("init_state", recipe)
    if not isinstance(recipe, DelayedScaling):
        return {}
    state = {}
    for role in ROLES:
        state[f"{role}_{SCALE}"] = jnp.ones(1, jnp.float32)
        state[f"{role}_{HISTORY}"] = jnp.zeros(recipe.amax_history_len, jnp.float32)
    return state


def check_state(
    op: str,
    recipe: Recipe,
    state: Mapping[str, jax.Array] | None,
    roles: Sequence[str] = ROLES,
    *,
    argument: str,
) -> Mapping[str, Any]:
    """Returns the FP8 state, after checking its keys, shapes and dtypes.

    `argument` is the name of the caller's argument, for errors.
    """
    name = type(recipe).__name__
    if not isinstance(recipe, DelayedScaling):
        is_empty = isinstance(state, Mapping) and not state
        if state is not None and not is_empty:
            raise ConfigurationError(
                f"{op}: {name} has no state, but {argument} = {shown(state)}. Leave it "
                "out, or use DelayedScaling."
            )
        return {}
    shapes = {SCALE: (1,), HISTORY: (recipe.amax_history_len,)}
    wanted = {f"{r}_{name}": shape for r in roles for name, shape in shapes.items()}
    if not isinstance(state, Mapping) or set(state) != set(wanted):
        found = shown(list(state) if isinstance(state, Mapping) else state)
        raise ConfigurationError(
            f"{op}: DelayedScaling needs a state, but {argument} is {found}. Pass one "
            "from ub.fp8.init_state(recipe)."
        )
    for key, shape in wanted.items():
        array = state[key]
        fits = is_array(array) and array.shape == shape
        if not fits or array.dtype != jnp.float32:
            found = f"{array.dtype}{array.shape}" if is_array(array) else shown(array)
            raise ShapeContractError(
                f"{op}: {argument}[{shown(key)}] is {found}, but here it is "
                f"float32{shape}. Pass a state from ub.fp8.init_state(recipe)."
            )
    return state


def apply_updates(state: Any, gradients: Any) -> Any:
    """Returns the new `DelayedScaling` state after a training step, from its gradients.

    `jax.grad` returns the new state in place of a gradient of the state. It replaces
    the old state only where its scale is finite and above zero: the gradient is zero if
    the layer was not used, and may be minus infinity if `jax.lax.cond` skipped it.

    Transformer Engine: it updates scales when an autocast ends.

    Args:
        state: a tree of states; scales and histories may have leading axes, such as the
            layers of a `jax.lax.scan`.
        gradients: a tree of the same structure.

    Returns:
        A tree of the same structure.

    Raises:
        ShapeContractError: if the trees or the shapes of their arrays differ, or if
            they contain other arrays than scales and histories.
    """
    op = "apply_updates"
    old, tree = jax.tree_util.tree_flatten_with_path(state)
    new, new_tree = jax.tree.flatten(gradients)
    trees: list[Any] = [tree, new_tree]
    if trees[0] != trees[1]:
        raise ShapeContractError(
            f"{op}: state and gradients are different trees, {shown(tree)} and "
            f"{shown(new_tree)}. Pass the gradient with respect to the state."
        )
    leaves = [
        (*_sibling(path), jax.tree_util.keystr(path), before, after)
        for (path, before), after in zip(old, new, strict=True)
    ]
    scales = {prefix: after for prefix, kind, *_, after in leaves if kind == SCALE}
    for prefix, kind, key, before, after in leaves:
        if not kind or prefix not in scales:
            raise ShapeContractError(
                f"{op}: state{key} is neither a scale nor its amax history. Pass the "
                "state alone, without parameters and main_grads."
            )
        check_array(op, f"state{key}", before)
        check_array(op, f"gradients{key}", after)
        if before.shape != after.shape:
            raise ShapeContractError(
                f"{op}: {key} has shape {before.shape} in state, but {after.shape} in "
                "gradients. Pass the gradient with respect to the state."
            )
    is_valid = {prefix: jnp.isfinite(s) & (s > 0) for prefix, s in scales.items()}
    results = [
        jnp.where(is_valid[prefix], after, before)
        for prefix, _, _, before, after in leaves
    ]
    return jax.tree.unflatten(tree, results)


def _sibling(path):
    """Splits the path of a leaf in an FP8 state into (tensor's path, kind of the leaf).

    The kind is "scale" or "amax_history", and "" for any other leaf.
    """
    text = jax.tree_util.keystr(path)
    for kind in (SCALE, HISTORY):
        head, found, tail = text.rpartition(f"_{kind}")
        # After a key that ends in `kind`, the text of a path has only punctuation such
        # as "']", and ".value" for an nnx variable. If letters or digits follow, the
        # key is longer, and the leaf is not part of an FP8 state.
        rest = tail.removesuffix(".value")
        if found and not any(c.isalnum() or c == "_" for c in rest):
            return (head, tail), kind
    return (text, ""), ""
