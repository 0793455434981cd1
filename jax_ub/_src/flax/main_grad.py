"""Variables that accumulate kernel gradients over microbatches."""

from flax import nnx


class MainGrad(nnx.Variable):
    """An nnx variable that accumulates a kernel's gradient over microbatches, in f32.

    Its cotangent is its new value, `main_grad + dw`, and the kernel's cotangent is
    zero. This is Flax's "overwrite with gradient" convention.
    """


def with_main_grads(gradients: nnx.State, main_grads: nnx.State) -> nnx.State:
    """Replaces each kernel's gradient by its accumulated gradient, for an optimizer.

    Args:
        gradients: the gradients of the parameters. They are zero for kernels with a
            `main_grad`.
        main_grads: the model's `MainGrad` variables after the last microbatch.

    Returns:
        `gradients`, with each `main_grad` as the gradient of its layer's `kernel`.
    """
    flat = dict(nnx.to_flat_state(gradients))
    for path, main_grad in nnx.to_flat_state(main_grads):
        place = (*path[:-1], "kernel")
        flat[place] = flat[place].replace(main_grad.get_value())
    return nnx.from_flat_state(flat)
