"""An operation that adds a bias vector to every token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.sharding import PartitionSpec

from jax_ub._src import checks as shapes
from jax_ub._src.ops.fields import initialize
from jax_ub._src.ops.operation import BasicOperation, compute_dtype
from jax_ub._src.reference import with_rank
from jax_ub._src.rules.bias import row_sum


@dataclasses.dataclass(frozen=True, repr=False)
class Bias(BasicOperation):
    """Adds a learned vector to the features of every token.

    Transformer Engine: `te.ops.Bias`. Parameter: "bias". No residuals.

    Attributes:
        size: the global number of features.
        tensor_parallel: whether the features are sharded over `axis_name`.
        axis_name: the mesh axis that the features are sharded over.
        dtype: dtype of y; None takes the dtype of x.
        param_dtype: dtype of the bias.
        bias_init: initializer of the global bias.
    """

    size: int
    _: dataclasses.KW_ONLY
    tensor_parallel: bool = False
    axis_name: str = "tp"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    bias_init: Callable[..., jax.Array] = initializers.zeros

    def __post_init__(self):
        """Checks the number of features and the other constructor arguments.

        Raises:
            ShapeContractError: if `size` is not a positive integer.
        """
        super().__post_init__()
        shapes.check_size(self.label, "size", self.size)

    def init(self, key):
        """Creates the bias, a global array of shape `[size]`."""
        return {
            "bias": initialize(self, "bias_init", self.bias_init, key, (self.size,))
        }

    def specs(self):
        """Returns the bias's spec: sharded over `axis_name` if `tensor_parallel`."""
        spec = PartitionSpec(self.axis_name) if self.tensor_parallel else None
        return {"bias": PartitionSpec() if spec is None else spec}

    def saved(self, needs):
        """Returns no names, because the gradients do not depend on the inputs."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Adds the bias to x in f32 and rounds the sum once."""
        bias = params["bias"]
        shapes.check_rank(self.label, "x", x, 1)
        shapes.check_float(self.label, x=x, bias=bias)
        wanted = x.shape[-1:]
        shapes.check_shape(self.label, "bias", bias, wanted, "this rank's features")
        y = x.astype(jnp.float32) + with_rank(bias.astype(jnp.float32), x.ndim)
        return y.astype(compute_dtype(self.dtype, x)), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns dy as dx, and the sum of dy over all tokens as the bias gradient.

        The sum is computed in f32.
        """
        d_params = {}
        if needs.params:
            d_params["bias"] = row_sum(dy)
        return dy if needs.x else None, d_params, ()
