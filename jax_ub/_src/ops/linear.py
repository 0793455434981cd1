"""A linear layer with its bias, as one entry of a `Sequential`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers

from jax_ub._src import arguments
from jax_ub._src import checks as shapes
from jax_ub._src.ops.basic.basic_linear import BasicLinear, default_kernel_init
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.operation import Operation, check_params, constructor_call


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(Operation):
    """A linear layer, `x @ kernel + bias`, as one entry of a `Sequential`.

    The bias of a row-parallel layer is replicated and added once, after the reduction.
    The bias of a column-parallel layer is sharded like the kernel's columns.

    Transformer Engine: `te.ops.Linear`, which has no `userbuffers_options`, and which
    sums one bias per rank in a row-parallel layer. Parameters, in one dict with the
    names of `flax.nnx.Linear`: "kernel", "bias" and, if enabled, "main_grad".

    Attributes:
        in_features: the global number of input features.
        out_features: the global number of output features.
        use_bias: whether a bias is added.
        tensor_parallel_mode: "column", "row" or None.
        axis_name: the mesh axis that the kernel is sharded over.
        sequence_parallel: whether the activations outside a column-row pair are sharded
            along their tokens.
        userbuffers_options: `{"comm_name": name}` overlaps the layer's communication
            with its GEMMs.
        accumulate_into_main_grad: whether the kernel's gradient is added to the
            parameter "main_grad".
        method: how the layer overlaps its GEMM with communication; see `BasicLinear`.
        dtype: dtype of the computation; None takes the dtype of x.
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
        """Checks the layer's options, by constructing its `BasicLinear`."""
        arguments.check("Linear", use_bias=self.use_bias)
        linear = self.basic_ops[0]
        options = getattr(linear, "userbuffers_options", None)
        object.__setattr__(self, "userbuffers_options", options)

    def __repr__(self) -> str:
        """Returns the constructor call as text, leaving out default arguments."""
        return constructor_call(self)

    @property
    def basic_ops(self):
        """The layer's operations: a `BasicLinear` and, with `use_bias`, a `Bias`."""
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
        """Creates kernel, bias and main_grad in one dict, as global arrays."""
        shapes.check_key("Linear", "key", key)
        keys = jax.random.split(key)
        parts = (op.init(k) for op, k in zip(self.basic_ops, keys, strict=False))
        return {name: value for part in parts for name, value in part.items()}

    def specs(self):
        """Returns the `PartitionSpec` of each parameter by name."""
        return {k: v for op in self.basic_ops for k, v in op.specs().items()}

    def split(self, params):
        """Splits the layer's parameters into those of `BasicLinear` and of `Bias`."""
        check_params("Linear", params)
        if not self.use_bias:
            return (params,)
        bias = {name: v for name, v in params.items() if name == "bias"}
        return {name: v for name, v in params.items() if name != "bias"}, bias
