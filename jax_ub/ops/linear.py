"""A linear layer with its bias, as one entry of a Sequential."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers

from jax_ub import arguments, shapes
from jax_ub.ops.basic.basic_linear import BasicLinear, default_kernel_init
from jax_ub.ops.basic.bias import Bias
from jax_ub.ops.operation import Operation, check_params, constructor_call


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(Operation):
    """`x @ kernel + bias`: a `BasicLinear` and a `Bias`.

    The bias of a row-parallel layer is added once, after the reduction, and is the same
    on every rank; that of a column-parallel one is sharded as the columns are.

    Transformer Engine: `te.ops.Linear`, which has no `userbuffers_options`, and whose
    row-parallel bias is the sum of one for each rank. Parameters: "kernel", "bias" and
    "main_grad", where there is one, in one dict, as `flax.nnx.Linear` names them.

    Attributes:
        in_features: the global number of input features.
        out_features: the global number of output features.
        use_bias: whether a bias is added.
        tensor_parallel_mode: "column", "row" or None.
        axis_name: the mesh axis that the kernel is sharded over.
        sequence_parallel: whether tokens are sharded outside a column-row pair.
        userbuffers_options: `{"comm_name": name}` overlaps the layer.
        accumulate_into_main_grad: whether "main_grad" takes the kernel's gradient.
        method: how GEMM and communication run.
        dtype: dtype of the computation; None is that of x.
        param_dtype: dtype of the parameters.
        kernel_init: initializer of the global kernel.
        bias_init: initializer of the global bias.
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    tensor_parallel_mode: str | None = None
    axis_name: str = "tp"
    sequence_parallel: bool = False
    userbuffers_options: Any = None
    accumulate_into_main_grad: bool = False
    method: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., jax.Array] = default_kernel_init
    bias_init: Callable[..., jax.Array] = initializers.zeros

    def __post_init__(self):
        """Checks the options, as `BasicLinear` does."""
        arguments.check("Linear", use_bias=self.use_bias)
        linear = self.basic_ops[0]
        options = getattr(linear, "userbuffers_options", None)
        object.__setattr__(self, "userbuffers_options", options)

    def __repr__(self) -> str:
        """The constructor's call, without what is left at its default."""
        return constructor_call(self)

    @property
    def basic_ops(self):
        """The linear map, and the bias."""
        linear = BasicLinear(
            self.in_features,
            self.out_features,
            tensor_parallel_mode=self.tensor_parallel_mode,
            axis_name=self.axis_name,
            sequence_parallel=self.sequence_parallel,
            userbuffers_options=self.userbuffers_options,
            accumulate_into_main_grad=self.accumulate_into_main_grad,
            method=self.method,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
        )
        if not self.use_bias:
            return (linear,)
        bias = Bias(
            self.out_features,
            tensor_parallel=self.tensor_parallel_mode == "column",
            axis_name=self.axis_name,
            param_dtype=self.param_dtype,
            bias_init=self.bias_init,
        )
        return linear, bias

    def init(self, key):
        """Creates the global parameters."""
        shapes.check_key("Linear", "key", key)
        keys = jax.random.split(key)
        parts = (op.init(k) for op, k in zip(self.basic_ops, keys, strict=False))
        return {name: value for part in parts for name, value in part.items()}

    def specs(self):
        """The kernel's and the bias's."""
        return {k: v for op in self.basic_ops for k, v in op.specs().items()}

    def split(self, params):
        """The kernel and its main_grad, and the bias."""
        check_params("Linear", params)
        if not self.use_bias:
            return (params,)
        bias = {name: v for name, v in params.items() if name == "bias"}
        return {name: v for name, v in params.items() if name != "bias"}, bias
