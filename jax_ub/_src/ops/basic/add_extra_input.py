"""An operation that adds a second array, such as a residual connection."""

import dataclasses

import jax.numpy as jnp

from jax_ub._src import checks as shapes
from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class AddExtraInput(BasicOperation):
    """Adds a second array of the same shape to x, for example a residual.

    Transformer Engine: `te.ops.AddExtraInput`. No parameters, no residuals.

    Attributes:
        in_place: whether the sum may reuse the buffer of the extra input. If True,
            `ops.fused.ForwardLinearBiasAdd` and `ForwardLinearScaleAdd` compute the sum
            in the GEMM. XLA copies the buffer first if it is still read, so the
            caller's arrays never change.
    """

    num_extra_inputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    def saved(self, needs):
        """Returns no names, because the gradients do not depend on the inputs."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Adds x and the extra input in f32; rounds the sum to the dtype of x."""
        (extra,) = extra_inputs
        check_extra_input(self, x.shape, extra)
        y = extra.astype(jnp.float32) + x.astype(jnp.float32)
        return y.astype(x.dtype), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns dy as the gradient of x and as the gradient of the extra input."""
        wanted = any(needs.extra_inputs)
        return dy if needs.x else None, {}, (dy if wanted else None,)


def check_extra_input(op: AddExtraInput, shape: tuple[int, ...], extra) -> None:
    """Checks that the array to add is a float array of the given shape.

    Raises:
        ShapeContractError: if it is not.
    """
    shapes.check_float(op.label, extra_input=extra)
    shapes.check_shape(op.label, "the extra input", extra, shape, "the shape of x")
