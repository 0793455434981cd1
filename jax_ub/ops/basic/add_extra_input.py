"""The sum with an activation from elsewhere."""

import dataclasses

import jax.numpy as jnp

from jax_ub import shapes
from jax_ub.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class AddExtraInput(BasicOperation):
    """Adds an extra input of the same shape, for example a residual.

    Transformer Engine: `te.ops.AddExtraInput`. No parameters, no residuals.

    Attributes:
        in_place: whether the sum may be written into the extra input's buffer: lets
            `ops.fused.ForwardLinearBiasAdd` and `ForwardLinearScaleAdd` make it in the
            GEMM. JAX copies first where that is needed elsewhere: no array of the
            caller's ever changes.
    """

    num_extra_inputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    def saved(self, needs):
        """Nothing."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Adds in f32 and rounds once, to the dtype of x."""
        (extra,) = extra_inputs
        check_extra_input(self, x.shape, extra)
        y = extra.astype(jnp.float32) + x.astype(jnp.float32)
        return y.astype(x.dtype), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """dy, for both."""
        wanted = any(needs.extra_inputs)
        return dy if needs.x else None, {}, (dy if wanted else None,)


def check_extra_input(op: AddExtraInput, shape: tuple[int, ...], extra) -> None:
    """Checks the extra input against the shape of what it is added to.

    Raises:
        ShapeContractError: if they differ, or it is no float.
    """
    shapes.check_float(op.label, extra_input=extra)
    shapes.check_shape(op.label, "the extra input", extra, shape, "the shape of x")
