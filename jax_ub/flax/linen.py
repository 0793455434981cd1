"""`flax.linen.Dense`, tensor parallel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_ub.retrofit.placement import Placement
from jax_ub.retrofit.sharded_linear import sharded_linear


class Linear(nn.Module):
    """A linear layer over the last dimension, in the layout of `parallel`.

    It has the parameters of `flax.linen.Dense`, with the same names, global shapes and
    initial values, so that checkpoints swap. On global arrays it lays them out on the
    mesh by itself; inside the caller's `jax.shard_map` it works on shards. Parameters
    carry no layout of their own: `kernel_init=nn.with_partitioning(...)` adds one.

    Attributes:
        features: the global number of output features.
        use_bias: whether a bias is added.
        dtype: dtype of the computation; None infers it from inputs and parameters.
        param_dtype: dtype of the parameters.
        precision: taken for `flax.linen.Dense`'s sake: sums are made in f32 anyway.
        kernel_init: initializer of the kernel `[in, features]`.
        bias_init: initializer of the bias `[features]`.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        parallel: "column", "row" or None.
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        data_axes: the mesh axes that shard the leading axis of the inputs. None takes
            all axes but `axis_name`, where their product divides it.
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        ub_name: the layer's name: in errors, and in `initialize_ub`.
        main_grad: whether the kernel's gradient is accumulated into the f32 variable
            `main_grad` of the collection "_overwrite_with_gradient", whose cotangent is
            its new value; that of the kernel is zero.
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = initializers.lecun_normal()
    bias_init: Any = initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    parallel: str | None = None
    axis_name: str = "tp"
    mesh: jax.sharding.Mesh | None = None
    data_axes: tuple[str, ...] | None = None
    sequence_parallel: bool = True
    method: str | None = None
    ub_name: str | None = None
    main_grad: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps `[..., tokens, in]` to `[..., tokens, features]`."""
        placement = self._placement()
        out_features = self.features
        if placement.is_local() and placement.parallel == "column":
            mesh = jax.sharding.get_abstract_mesh()
            placement.check_features((inputs.shape[-1], out_features), mesh)
            out_features //= mesh.shape[self.axis_name]
        shape = (inputs.shape[-1], out_features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (out_features,), self.param_dtype)
        main_grad = None
        if self.main_grad:
            main_grad = self.variable(
                OVERWRITE_WITH_GRADIENT, "main_grad", jnp.zeros, shape, jnp.float32
            ).value
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        if self.is_initializing():
            # Inputs of init are often dummies, of any number of tokens and no layout.
            return jnp.zeros((*inputs.shape[:-1], out_features), inputs.dtype)
        return sharded_linear(placement, inputs, kernel, bias, main_grad)

    def _placement(self):
        return Placement(
            self.parallel,
            self.axis_name,
            self.mesh,
            self.data_axes,
            self.sequence_parallel,
            self.method,
            self.ub_name,
        )
