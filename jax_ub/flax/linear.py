"""`flax.nnx.Linear`, tensor parallel."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers

from jax_ub.flax.main_grad import MainGrad
from jax_ub.retrofit.placement import Placement
from jax_ub.retrofit.sharded_linear import lay_out, sharded_linear

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class Linear(nnx.Module):
    """A linear layer over the last dimension, in the layout of `parallel`.

    It has the parameters of `flax.nnx.Linear`, with the same names, global shapes and
    initial values, so that checkpoints swap. On global arrays it is called like that
    layer, and lays its arrays out on the mesh by itself. Inside the caller's
    `jax.shard_map` it works on shards: split the module with `nnx.split`, pass its
    state with the specs of `nnx.get_partition_spec`, and merge it inside.

    | parallel | x | kernel | y |
    |---|---|---|---|
    | "column" | tokens sharded, gathered here | `[in, out/P]` | features sharded |
    | "row" | features sharded | `[in/P, out]` | summed, tokens sharded |
    | None | as it comes | `[in, out]` | as it comes |

    Attributes:
        kernel: `[in_features, out_features]`.
        bias: `[out_features]` or None.
        main_grad: the accumulator of the kernel's gradient, or None.
    """

    def __init__(  # noqa: PLR0913, flax.nnx.Linear's arguments and where it runs
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        promote_dtype: Any = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        parallel: str | None = None,
        axis_name: str = "tp",
        mesh: jax.sharding.Mesh | None = None,
        data_axes: tuple[str, ...] | None = None,
        sequence_parallel: bool = True,
        method: str | None = None,
        ub_name: str | None = None,
        main_grad: bool = False,
    ):
        """Creates the parameters, sharded where a mesh is known.

        Args:
            in_features: the global number of input features.
            out_features: the global number of output features.
            use_bias: whether a bias is added.
            dtype: dtype of the computation; None infers it from inputs and parameters.
            param_dtype: dtype of the parameters.
            precision: taken for `flax.nnx.Linear`'s sake: sums are made in f32 anyway.
            kernel_init: initializer of the kernel.
            bias_init: initializer of the bias.
            promote_dtype: brings `(inputs, kernel, bias)` to one dtype.
            preferred_element_type: dtype of the result; None is that of the inputs.
            rngs: the random keys.
            kernel_metadata: metadata of the kernel; "out_sharding" in it replaces the
                layout that `parallel` gives.
            bias_metadata: the same for the bias.
            parallel: "column", "row" or None.
            axis_name: the tensor-parallel mesh axis.
            mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
            data_axes: the mesh axes that shard the leading axis of the inputs. None
                takes all axes but `axis_name`, where their product divides it.
            sequence_parallel: whether tokens are sharded over `axis_name` between the
                layers; otherwise a column layer gathers nothing and a row layer
                all-reduces.
            method: how it runs; None is `JAX_UB_METHOD`, or "auto".
            ub_name: the layer's name: in errors, and in `initialize_ub`.
            main_grad: whether the kernel's gradient is accumulated into `main_grad`.

        Raises:
            UnknownNameError: if there is no such `parallel`, `method` or axis.
            ShapeContractError: if a sharded dimension does not divide into the ranks,
                or the kernel's metadata shards the other one.
        """
        self.placement = Placement(
            parallel, axis_name, mesh, data_axes, sequence_parallel, method, ub_name
        )
        known = self.placement.find_mesh()
        if known is not None:
            self.placement.check_features((in_features, out_features), known)
        spec, bias_spec = self.placement.kernel_spec, self.placement.bias_spec
        kernel_metadata = _with_sharding(kernel_metadata, spec, self.placement)
        bias_metadata = _with_sharding(bias_metadata, bias_spec, self.placement)
        shape = (in_features, out_features)
        kernel = kernel_init(rngs.params(), shape, param_dtype)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.placement.check_kernel_spec(
            nnx.get_partition_spec(self.kernel).get_value()
        )
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.main_grad = nnx.data(None)
        if main_grad:
            accumulator = jnp.zeros(shape, jnp.float32)
            self.main_grad = MainGrad(accumulator, **kernel_metadata)

        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

        `out_sharding` moves the result, from where `parallel` leaves it.
        """
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], None if self.bias is None else self.bias[...]),
            dtype=self.dtype,
        )
        y = sharded_linear(
            self.placement,
            inputs,
            kernel,
            bias,
            None if self.main_grad is None else self.main_grad[...],
            out_dtype=self.preferred_element_type,
        )
        return lay_out(y, out_sharding)


def _with_sharding(metadata, spec, placement):
    """Adds `spec` to a variable's metadata, where the caller says nothing else."""
    said = {"out_sharding", "sharding", "sharding_names"} & set(metadata)
    if placement.parallel is None or said:
        return metadata
    added: dict[str, Any] = {"out_sharding": tuple(spec)}
    if placement.mesh is not None:
        added["mesh"] = placement.mesh
    elif placement.find_mesh() is None or placement.is_local():
        # Flax refuses to shard without a mesh; the layout is worth noting all the same.
        added["eager_sharding"] = False
    return added | dict(metadata)
