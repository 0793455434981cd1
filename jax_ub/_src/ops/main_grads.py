"""Separates gradient accumulators ("main_grad") from the weights of a model."""

from typing import Any

import jax

NAME = "main_grad"


def split_main_grads(params: Any) -> tuple[Any, Any]:
    """Separates the gradient accumulators ("main_grad") from the weights.

    The cotangent of a "main_grad" is its new value. A loop over microbatches passes it
    from one microbatch to the next, while the weights stay constant:

        weights, main_grads = ops.split_main_grads(params)
        for x in microbatches:
            loss = lambda m: loss_of(seq(ops.merge_main_grads(weights, m), x))
            main_grads = jax.grad(loss)(main_grads)

    Args:
        params: the result of `Sequential.init`, or of `specs()`.

    Returns:
        The weights and the main_grads, each in the tree of `params`. Leaves that belong
        to the other tree are None.
    """
    is_main_grad = _is_main_grad(params)
    weights = jax.tree.map(lambda own, p: None if own else p, is_main_grad, params)
    main_grads = jax.tree.map(lambda own, p: p if own else None, is_main_grad, params)
    return weights, main_grads


def merge_main_grads(weights: Any, main_grads: Any) -> Any:
    """Merges weights and gradient accumulators that `split_main_grads` separated."""
    return jax.tree.map(
        lambda weight, main_grad: main_grad if weight is None else weight,
        weights,
        main_grads,
        is_leaf=lambda leaf: leaf is None,
    )


def gradients_of_main_grads(gradients: Any, main_grads: Any) -> Any:
    """Replaces each kernel's gradient by the gradient that its main_grad accumulated.

    Args:
        gradients: gradients of the weights, in the tree that `split_main_grads`
            returns. They are zero for kernels with a main_grad.
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
