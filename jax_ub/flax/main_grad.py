"""Gradients that accumulate beside their kernels."""

from flax import nnx


class MainGrad(nnx.Variable):
    """The f32 accumulator of a kernel's gradient, which its gradient overwrites.

    Its cotangent is not a gradient but its new value, `main_grad + dw`, and that of the
    kernel beside it is zero: Flax's "overwrite with gradient" convention.
    """


def with_main_grads(gradients: nnx.State, main_grads: nnx.State) -> nnx.State:
    """Puts accumulated gradients in the places of their kernels' own, for an optimizer.

    Args:
        gradients: the gradients of the parameters, zero for kernels with a `main_grad`.
        main_grads: the model's `MainGrad` variables after the last microbatch.

    Returns:
        `gradients`, with every `main_grad` as the gradient of the `kernel` beside it.
    """
    flat = dict(nnx.to_flat_state(gradients))
    for path, main_grad in nnx.to_flat_state(main_grads):
        place = (*path[:-1], "kernel")
        flat[place] = flat[place].replace(main_grad.get_value())
    return nnx.from_flat_state(flat)
