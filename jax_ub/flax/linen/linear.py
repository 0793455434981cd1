"""`flax.linen.Dense` and `DenseGeneral`, tensor parallel."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_ub import arguments, shapes
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub.flax.linen.tensor_parallel import TensorParallel
from jax_ub.flax.together import multiply_promoted, read_sizes, sizes_of
from jax_ub.retrofit.sharding_layout import ShardingLayout


class Linear(TensorParallel):
    """A linear layer over the last dimension, in the layout of `parallel`.

    It has the parameters of `flax.linen.Dense`, with the same names, global shapes and
    initial values, so that checkpoints swap; and with several in or out dimensions
    those of `flax.linen.DenseGeneral` over the last ones, of which the first is
    sharded: attention heads, of `[heads, head_dim]`. On global arrays it lays them out
    on the mesh by itself; inside the caller's `jax.shard_map` it works on shards.
    Parameters carry no layout of their own: `kernel_init=nn.with_partitioning(...)`
    adds one.

    While parameters are created, kernels are whole and the inputs of any number of
    tokens. Inside the caller's `jax.shard_map`, where a rank has but a part of both,
    the results are zeros then.

    Attributes:
        features: the global number of output features, or sizes of several dimensions.
        axis: the dimensions of the inputs that are contracted, which are the last ones.
        parallel: "column", "row" or None.
        ub_name: the layer's name: in errors, and in `initialize_ub`.
    """

    features: int | Sequence[int]
    _: dataclasses.KW_ONLY
    axis: int | Sequence[int] = -1
    parallel: str | None = None
    ub_name: str | None = None

    @property
    def sharding_layout(self) -> ShardingLayout:
        """Where the arrays of the layer lie."""
        return ShardingLayout(
            self.parallel,
            self.axis_name,
            self.mesh,
            self.data_axes,
            self.sequence_parallel,
            self.method,
            self.ub_name,
            self.fsdp_axes,
            self.overlap_flags,
        )

    def __call__(
        self, inputs: jax.Array, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Maps `[..., tokens, *in]` to `[..., tokens, *features]`.

        Args:
            inputs: the activations.
            residual: what is added to the result, of its shape and place; a row layer
                does that inside the call, and rounds once.

        Raises:
            UnsupportedOverlapError: if `axis` is not that of the last dimensions.
            ShapeContractError: if the inputs are no array with features.
        """
        (y,) = call_together((self,), inputs, residual)
        return y

    @nn.compact
    def parameters(
        self, in_sizes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Creates or finds kernel, bias and main_grad for inputs of `[..., *in]`."""
        sharding_layout = self.sharding_layout
        out_sizes = read_sizes(sharding_layout.op, "features", self.features)
        if sharding_layout.is_local() and sharding_layout.parallel == "column":
            mesh = jax.sharding.get_abstract_mesh()
            sharding_layout.check_features((in_sizes[0], out_sizes[0]), mesh)
            out_sizes = (
                out_sizes[0] // sharding_layout.axis_size(mesh),
                *out_sizes[1:],
            )
        shape = [*in_sizes, *out_sizes]
        shape[sharding_layout.fsdp_dim * len(in_sizes)] //= (
            sharding_layout.num_manual_fsdp()
        )
        kernel_init = _of_matrix(
            sharding_layout.op, "kernel_init", self.kernel_init, len(in_sizes)
        )
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = main_grad = None
        if self.use_bias:
            bias_init = _of_matrix(sharding_layout.op, "bias_init", self.bias_init, 0)
            bias = self.param("bias", bias_init, out_sizes, self.param_dtype)
        if self.main_grad:
            main_grad = self.variable(
                OVERWRITE_WITH_GRADIENT, "main_grad", jnp.zeros, shape, jnp.float32
            ).value
        return kernel, bias, main_grad

    @nn.nowrap
    def num_in(self, ndim: int) -> int:
        """How many of the inputs' dimensions are contracted.

        Raises:
            UnsupportedOverlapError: if they are not the last ones.
        """
        given = sizes_of(self.axis)
        if not given or not all(map(shapes.is_integer, given)):
            raise ShapeContractError(
                f"{self.sharding_layout.op}: axis = {shown(self.axis)} is neither an "
                "integer nor several. Pass the dimensions that are contracted, for "
                "example -1."
            )
        axes = sorted(axis if axis < 0 else axis - ndim for axis in given)
        if axes != list(range(-len(axes), 0)):
            raise UnsupportedOverlapError(
                f"{self.sharding_layout.op}: axis = {self.axis} of inputs of {ndim} "
                "dimensions, but the last ones are contracted. Use axis = "
                f"{tuple(range(-len(axes), 0))}, and jnp.moveaxis before it."
            )
        return len(axes)


def call_together(
    layers: Sequence[Linear], inputs: jax.Array, residual: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Calls layers of one kind on the same inputs, which are gathered once for all.

    Args:
        layers: the layers; they differ in their out dimensions and parameters only.
        inputs: `[..., tokens, *in]`.
        residual: `[..., tokens, *out]` or None, for one layer.
    """
    first = layers[0]
    shapes.check_rank(first.sharding_layout.op, "x", inputs, 1)
    num_in = first.num_in(inputs.ndim)
    lead, in_sizes = inputs.shape[:-num_in], inputs.shape[-num_in:]
    parameters = [layer.parameters(in_sizes) for layer in layers]
    main_grads = [main_grad for *_, main_grad in parameters if main_grad is not None]
    promoted = []
    for layer, (kernel, bias, _) in zip(layers, parameters, strict=True):
        given = (inputs, kernel, bias)
        promote = functools.partial(layer.promote_dtype, *given, dtype=layer.dtype)
        promoted.append(arguments.promoted(first.sharding_layout.op, promote, given))
    all_inputs = [given for given, *_ in promoted]
    kernels = [kernel for _, kernel, _ in promoted]
    biases = [bias for *_, bias in promoted if bias is not None]
    sharding_layout = first.sharding_layout
    if first.is_initializing():
        if sharding_layout.is_local():
            # A rank's own shards of dummies and kernels need not fit each other.
            addends = () if residual is None else (residual,)
            return tuple(
                jnp.zeros((*lead, *kernel.shape[num_in:]), jnp.result_type(x, *addends))
                for x, kernel in zip(all_inputs, kernels, strict=True)
            )
        sharding_layout, main_grads = sharding_layout.whole(), []
    return multiply_promoted(
        sharding_layout,
        all_inputs,
        kernels,
        biases,
        main_grads,
        num_in=num_in,
        residual=residual,
    )


def _of_matrix(op: str, name: str, init: Callable, num_in: int) -> Callable:
    """An initializer whose values depend on the number of inputs and outputs alone."""

    def initialize(key, shape, dtype):
        ins, outs = math.prod(shape[:num_in]), math.prod(shape[num_in:])
        flat = (ins, outs) if num_in else (outs,)
        values = init(key, flat, dtype)
        # Not nn.meta.unbox: it would apply the layout of the final shape to `flat`.
        leaves = jax.tree.leaves(values)
        shapes.check_initial(op, name, leaves[0] if len(leaves) == 1 else values, flat)
        # The tree keeps metadata that surrounds the values.
        return jax.tree.map(lambda values: values.reshape(shape), values)

    return initialize
