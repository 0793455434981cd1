"""State of `DelayedScaling`: an amax history and a scale for each tensor."""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src.checks import check_float, is_array
from jax_ub._src.errors import ConfigurationError, ShapeContractError, shown
from jax_ub._src.fp8.recipes import (
    KERNEL,
    OUTPUT_GRAD,
    ROLES,
    DelayedScaling,
    Recipe,
    check_recipe,
    updated_history,
)
from jax_ub._src.primitives.claims import claim
from jax_ub._src.scaled_array import is_scaled

SCALE, HISTORY = "scale", "amax_history"
# The keys of a layer's `DelayedScaling` state, such as "kernel_scale".
NAMES = frozenset(f"{role}_{name}" for role in ROLES for name in (SCALE, HISTORY))


def names_of(role: str) -> tuple[str, str]:
    """Returns a role's two keys in an FP8 state, such as "kernel_scale"."""
    return f"{role}_{SCALE}", f"{role}_{HISTORY}"


OUTPUT_GRAD_STATE = names_of(OUTPUT_GRAD)

# Part of error messages: the dtype that lets several calls share an FP8 state.
_MAXIMUM = (
    "the dtype whose sum is the maximum, jax.lax.convert_element_type(array, "
    "flax.linen.fp8_ops.fp32_max_grad),"
)


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


def claim_state(op: str, state: Any, roles: Sequence[str] = ROLES) -> Any:
    """Returns an FP8 state in f32, and marks it as used by one call.

    The cotangents of the scales and histories of `roles` are their new values, which
    JAX would add if several calls had the same state. For arrays of dtype
    `flax.linen.fp8_ops.fp32_max_grad`, JAX takes the maximum instead, so that several
    calls may share them.

    `state` may be a tuple of states. Other values are returned as they are, and
    `check_state` rejects them.

    Raises:
        ShapeContractError: when JAX differentiates the call with respect to a state
            that another call has used in this trace, or over which the `jax.lax.scan`
            of the call closes.
    """
    if isinstance(state, tuple):
        return tuple(claim_state(op, one, roles) for one in state)
    if not isinstance(state, Mapping):
        return state
    names = {name for role in roles for name in names_of(role)}
    claimed = {}
    for key, array in state.items():
        if has_maximum_as_sum(array):
            claimed[key] = _in_f32(array.dtype, array)
        else:
            claimed[key] = _claimed(op, array) if key in names else array
    return claimed


def claim_layer_state(
    op: str, state: Any, ws: Sequence[Any], roles: Sequence[str] = ROLES
) -> Any:
    """Returns a layer's FP8 state in f32, and marks it as used, like `claim_state`.

    Kernels that are FP8 already do not use their part of the state.
    """
    if all(map(is_scaled, ws)):
        roles = tuple(role for role in roles if role != KERNEL)
    return claim_state(op, state, roles)


def _claimed(op, array):
    return claim(
        array,
        f"{op}: this FP8 state went into another call already, and jax would add the "
        "two new states. Give every call a state of its own, or convert the state to "
        f"{_MAXIMUM} in front of both calls. Pass jax.lax.stop_gradient(state) to a "
        "call that does not update it, such as an evaluation.",
        f"{op}: jax.lax.scan closes over this FP8 state, and jax would add the new "
        f"states of all iterations. Convert the state to {_MAXIMUM} in front of the "
        "loop, or differentiate inside the loop and carry the state.",
    )


def has_maximum_as_sum(array: Any) -> bool:
    """Returns whether an array has the dtype `flax.linen.fp8_ops.fp32_max_grad`."""
    # The dtype is recognized by its attribute, because Flax is an optional dependency.
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "float_dtype", None) == jnp.float32


# JAX cannot differentiate a conversion from Flax's dtype, so it gets a custom rule.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_f32(dtype, array):
    return lax.convert_element_type(array, jnp.float32)


_in_f32.defvjp(
    lambda dtype, array: (_in_f32(dtype, array), None),
    lambda dtype, _, cotangent: (lax.convert_element_type(cotangent, dtype),),
)


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
                f"float32{shape}. Pass a state from ub.fp8.init_state(recipe), and "
                "keep it in float32. A checkpoint's state needs the amax_history_len "
                "with which it was made."
            )
    return state


def apply_updates(state: Any, gradients: Any) -> Any:
    """Returns the new `DelayedScaling` state after a training step, from its gradients.

    `jax.grad` returns the new state in place of a gradient of the state. It replaces
    the old state only where its scale is finite and above zero: the gradient is zero if
    the layer was not used, and may be minus infinity if `jax.lax.cond` skipped it.

    JAX adds the new states of calls that share a state. The scale and the earlier
    amaxes are then restored. The sum of the latest amaxes is stored as their maximum,
    of which it is an upper bound.

    Transformer Engine: it updates scales when an autocast ends.

    Args:
        state: a tree of states; scales and histories may be stacked along further axes,
            such as the layers of a `jax.lax.scan`.
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
    tensors: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for prefix, kind, _, before, after in leaves:
        tensors[prefix][kind] = before, after
    for prefix, kind, key, before, after in leaves:
        if not kind or SCALE not in tensors[prefix]:
            raise ShapeContractError(
                f"{op}: state{key} is neither a scale nor its amax history. Pass the "
                "state alone, without parameters and main_grads."
            )
        check_float(op, **{f"state{key}": before, f"gradients{key}": after})
        if before.shape != after.shape:
            raise ShapeContractError(
                f"{op}: {key} has shape {before.shape} in state, but {after.shape} in "
                "gradients. Pass the gradient with respect to the state."
            )
    for prefix, _, key, before, _ in leaves:
        of_scale = tensors[prefix][SCALE][0].shape
        if _axis_of_steps(of_scale, before.shape) is None:
            raise ShapeContractError(
                f"{op}: state{key} has shape {before.shape}, and its scale {of_scale}, "
                "but one axis of a scale has size 1 where its history has "
                "amax_history_len, and the others are equal. Pass the states of "
                "ub.fp8.init_state, or stack all arrays of a state along one axis."
            )
    updated = {prefix: _updated(tensor) for prefix, tensor in tensors.items()}
    results = [updated[prefix][kind] for prefix, kind, *_ in leaves]
    return jax.tree.unflatten(tree, results)


def _axis_of_steps(of_scale, of_history):
    """Returns the axis of the steps of an amax history; its scale has size 1 there.

    Other axes may be in front of it or behind it, such as the layers of a `nn.scan`.
    Returns None if the shapes do not fit each other.
    """
    sizes = [*enumerate(zip(of_scale, of_history, strict=False))]
    axes = [axis for axis, (one, size) in sizes if one != size]
    # A history of one step has the shape of its scale.
    axes = axes or [axis for axis, (one, _) in sizes if one == 1][:1]
    fits = len(of_scale) == len(of_history) and 0 not in of_history
    if not fits or [of_scale[axis] for axis in axes] != [1]:
        return None
    return axes[0]


@jax.jit  # traced once for all tensors of the same shapes
def _updated(tensor):
    """Returns a dict of a tensor's new scale and amax history.

    `tensor` is a dict of both, each a pair of the old value and its gradient. The
    history may be absent.
    """
    old_scale, new_scale = scale = tensor[SCALE]
    is_valid = jnp.isfinite(new_scale) & (new_scale > 0)
    if HISTORY not in tensor:
        return {SCALE: jnp.where(is_valid, new_scale, old_scale)}
    old, new = tensor[HISTORY]
    axis = _axis_of_steps(old_scale.shape, old.shape)
    shifted = updated_history(old, lax.slice_in_dim(new, 0, 1, axis=axis), axis)
    num = _num_added(scale, (old, new), shifted, axis)
    return {
        SCALE: jnp.where(is_valid, new_scale / num, old_scale),
        HISTORY: jnp.where(is_valid, jnp.where(num > 1, shifted, new), old),
    }


def _num_added(scale, history, shifted, axis):
    """Returns how many new states of a tensor JAX has added, of the scale's shape.

    All amaxes except the latest are the old ones, so their sum is a multiple of them.
    If none of these is a finite number above zero, but this step has kept the scale,
    the new scale is a multiple of the old one.

    Args:
        scale: the old and the new scale.
        history: the old and the new amax history.
        shifted: the old history with the latest amax of the new one.
        axis: the axis of the steps.
    """
    before, after = (
        lax.slice_in_dim(array, 1, None, axis=axis) for array in (shifted, history[1])
    )
    is_known, ratios = jnp.isfinite(before) & (before > 0), after / before
    most = jnp.where(is_known, ratios, 0).max(axis, keepdims=True, initial=0)
    least = jnp.where(is_known, ratios, jnp.inf).min(
        axis, keepdims=True, initial=jnp.inf
    )
    # A step keeps the scale if the largest amax is zero or not finite.
    total = jnp.sum(history[0], axis, keepdims=True)
    has_kept_scale = ~(jnp.isfinite(total) & (total > 0))
    of_scale = jnp.where(has_kept_scale, scale[1] / scale[0], 1)
    has_known = most > 0
    most, least = (jnp.where(has_known, ratio, of_scale) for ratio in (most, least))
    num = jnp.round(most)
    # Gradients may have been rounded to bf16.
    error = max(1e-4, float(jnp.finfo(history[1].dtype).eps)) * num
    is_sum = (num > 1) & (least > num - error) & (most < num + error)
    return jnp.where(is_sum, num, 1)


def _sibling(path):
    """Splits a leaf's path in an FP8 state into the tensor's path and the leaf's kind.

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
