"""Tensor-parallel `flax.linen.Dense` and `flax.linen.DenseGeneral`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_ub._src import arguments
from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub._src.flax.linen.tensor_parallel import TensorParallel
from jax_ub._src.flax.together import multiply_promoted, read_sizes, sizes_of
from jax_ub._src.sharding.layout import ShardingLayout


class Linear(TensorParallel):
    """A tensor-parallel linear layer over the last dimensions of its inputs.

    With sequence parallelism, the GEMM of a "column" layer overlaps with the all-gather
    of its inputs, and the GEMM of a "row" layer with the reduce-scatter of its result.

    The parameters have the names, global shapes and initial values of
    `flax.linen.Dense`, so both can load each other's checkpoints. With several input or
    output dimensions they are those of `flax.linen.DenseGeneral` over the last
    dimensions. The first of several dimensions is sharded: for attention heads
    `[heads, head_dim]`, the heads.

    With global arrays, the layer shards its operands over the mesh itself. Inside the
    caller's `jax.shard_map` it computes on shards. Parameters have sharding metadata
    only with `kernel_init=nn.with_partitioning(...)`.

    During initialization, kernels are not sharded and the inputs may have any number of
    tokens. Inside the caller's `jax.shard_map`, the shapes of the shards need not match
    then, so the results are zeros.

    Attributes:
        features: the global number of output features, or a tuple of output sizes.
        axis: the input dimensions that are contracted; must be the last ones.
        parallel: "column", "row" or None.
        ub_name: the layer's name in `initialize_ub` and in error messages.
    """

    features: int | Sequence[int]
    _: dataclasses.KW_ONLY
    axis: int | Sequence[int] = -1
    parallel: str | None = None
    ub_name: str | None = None

    @property
    def sharding_layout(self) -> ShardingLayout:
        """The mesh axes over which inputs, kernel and result are sharded, and how."""
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
        """Computes `inputs @ kernel + bias`, adding an optional residual.

        Maps `[..., tokens, *in]` to `[..., tokens, *features]`.

        Args:
            inputs: the activations.
            residual: array with the shape and the sharding of the result that is added
                to it. A row layer adds it inside its fused call, before rounding.

        Raises:
            UnsupportedOverlapError: if `axis` does not name the last dimensions.
            ShapeContractError: if the inputs are not an array with a feature dimension.
        """
        (y,) = call_together((self,), inputs, residual)
        return y

    @nn.compact
    def parameters(
        self, in_sizes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns kernel, bias and main_grad; creates them during initialization.

        Bias and main_grad (the accumulator of the kernel's gradient) are None if they
        are disabled.
        """
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
        """Returns the number of input dimensions that the layer contracts.

        `ndim` is the rank of the inputs.

        Raises:
            ShapeContractError: if `axis` is neither an integer nor a list of integers.
            UnsupportedOverlapError: if `axis` does not name the last dimensions.
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
    """Applies several layers to the same inputs, which are gathered only once.

    Returns one result for each layer.

    Args:
        layers: the layers. They may differ only in output sizes and parameters.
        inputs: `[..., tokens, *in]`.
        residual: `[..., tokens, *out]`; only with a single layer.
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
            # Zeros, because the shards of inputs and kernel that a rank has during
            # initialization may have different contracting sizes.
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
    """Wraps an initializer to initialize kernels of any rank as a matrix.

    Initial values then depend only on the numbers of inputs and outputs.
    """

    def initialize(key, shape, dtype):
        ins, outs = math.prod(shape[:num_in]), math.prod(shape[num_in:])
        flat = (ins, outs) if num_in else (outs,)
        values = init(key, flat, dtype)
        # nn.meta.unbox would apply the sharding constraint of `shape` to an array of
        # shape `flat`.
        leaves = jax.tree.leaves(values)
        shapes.check_initial(op, name, leaves[0] if len(leaves) == 1 else values, flat)
        # tree.map reshapes inside nn.Partitioned, so the result keeps its metadata.
        return jax.tree.map(lambda values: values.reshape(shape), values)

    return initialize
