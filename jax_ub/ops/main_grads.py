"""Accumulators of gradients, apart from the parameters that an optimizer updates."""

from typing import Any

import jax

NAME = "main_grad"


def split_main_grads(params: Any) -> tuple[Any, Any]:
    """Parts the parameters of `init`, so that each can be differentiated for itself.

    The cotangent of a "main_grad" is its new value, so a loop over microbatches carries
    it from one to the next, while the weights stay:

        weights, main_grads = ops.split_main_grads(params)
        for x in microbatches:
            loss = lambda m: loss_of(seq(ops.merge_main_grads(weights, m), x))
            main_grads = jax.grad(loss)(main_grads)

    Args:
        params: what `Sequential.init` returns, or `specs()`.

    Returns:
        The weights, and the main_grads in the same tree; None stands in the place of
        the others.
    """
    is_main_grad = _is_main_grad(params)
    weights = jax.tree.map(lambda own, p: None if own else p, is_main_grad, params)
    main_grads = jax.tree.map(lambda own, p: p if own else None, is_main_grad, params)
    return weights, main_grads


def merge_main_grads(weights: Any, main_grads: Any) -> Any:
    """Puts weights and main_grads together again."""
    return jax.tree.map(
        lambda weight, main_grad: main_grad if weight is None else weight,
        weights,
        main_grads,
        is_leaf=lambda leaf: leaf is None,
    )


def gradients_of_main_grads(gradients: Any, main_grads: Any) -> Any:
    """Puts accumulated values in the places of their kernels' own gradients.

    Args:
        gradients: of the weights, as `split_main_grads` parts them. Zero for kernels
            with a main_grad.
        main_grads: the main_grads after the last microbatch.

    Returns:
        The gradients of the weights, for an optimizer.
    """
    flat = dict(jax.tree.leaves_with_path(main_grads))

    def accumulated(path, gradient):
        if not path or getattr(path[-1], "key", None) != "kernel":
            return gradient
        return flat.get((*path[:-1], jax.tree_util.DictKey(NAME)), gradient)

    return jax.tree.map_with_path(accumulated, gradients)


def _is_main_grad(params):
    return jax.tree.map_with_path(
        lambda path, _: getattr(path[-1], "key", None) == NAME, params
    )
