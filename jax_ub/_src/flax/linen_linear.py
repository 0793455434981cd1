"""The linen layer `Linear`, and `TensorParallel`, the base class of linen modules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_ub._src import arguments, checks
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub._src.flax.options import (
    LinearOptions,
    as_sizes,
    check_flags,
    promoted,
    read_sizes,
    userbuffers_name,
)
from jax_ub._src.fp8.flax_state import linen_state
from jax_ub._src.fp8.recipes import Recipe, check_layer_recipe
from jax_ub._src.primitives import vma
from jax_ub._src.scalars import is_integer
from jax_ub._src.sharding.layout import PickledMeshes, ShardingLayout
from jax_ub._src.sharding.sharded_linear import sharded_linear


class TensorParallel(arguments.KeywordsChecked, PickledMeshes, nn.Module, kw_only=True):
    """Base class of linen modules that are, or contain, tensor-parallel linear layers.

    Further attributes are keyword-only. They are the options of `jax_ub.flax.Linear`,
    except for those below. The constructor and the first call check them, with the
    errors of the classes of `jax_ub.flax`.

    Attributes:
        kernel_init: initializer of the kernels. It is called with the shape
            `[in, out]`, also for kernels with more dimensions.
        bias_init: initializer of the biases. It is called with the shape `[out]`.
        promote_dtype: function that casts inputs, kernel and bias to one dtype. It is
            called with three arguments.
        main_grad: whether a kernel's gradient is accumulated into the f32 variable
            `main_grad` of the collection "_overwrite_with_gradient". The cotangent of
            `main_grad` is then its new value, and the cotangent of the kernel is zero.
        fp8: the FP8 recipe of the linear layers. The state of `DelayedScaling` is in
            the same collection, with the names of `flax.linen.fp8_ops`.
    """

    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = initializers.lecun_normal()
    bias_init: Any = initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    axis_name: str | tuple[str, ...] = "tp"
    mesh: jax.sharding.Mesh | None = None
    data_axes: tuple[str, ...] | None = None
    sequence_parallel: bool = True
    method: str | None = None
    main_grad: bool = False
    fsdp_axes: tuple[str, ...] | str = ()
    ub_overlap_ag: bool | None = None
    ub_overlap_rs: bool | None = None
    ub_overlap_rs_dgrad: bool | None = None
    ub_bulk_dgrad: bool | None = None
    ub_bulk_wgrad: bool | None = None
    fp8: Recipe | None = None

    def __post_init__(self):
        arguments.check(type(self).__name__, **vars(self))
        check_layer_recipe(type(self).__name__, self.fp8)
        super().__post_init__()

    @nn.nowrap
    def linear_options(self) -> LinearOptions:
        """Returns the options that this module passes to its linear layers, by name."""
        names = LinearOptions.__annotations__
        return cast(LinearOptions, {name: getattr(self, name) for name in names})

    @nn.nowrap
    def checked_options(self) -> LinearOptions:
        """Checks the `ub_*` overlap flags, and returns all `linear_options`."""
        options = self.linear_options()
        check_flags(type(self).__name__, options)
        return options

    @nn.nowrap
    def inner_linear(
        self, features: int | Sequence[int], parallel: str, ub_name: str, **keywords
    ) -> "Linear":
        """Creates a linear layer inside this module, with this module's options."""
        options = self.linear_options()
        name = userbuffers_name(ub_name, options)
        return Linear(features, parallel=parallel, ub_name=name, **keywords, **options)

    @nn.nowrap
    def is_deterministic(self, deterministic: bool | None, *rates: float) -> bool:
        """Returns whether the argument or the module's attribute disables dropout.

        If all `rates` of dropout are 0, and for initialization, neither is needed.
        """
        arguments.check(type(self).__name__, deterministic=deterministic)
        attribute = self.deterministic
        is_given = attribute is not None or deterministic is not None
        if not any(rates) or (self.is_initializing() and not is_given):
            return True
        return nn.merge_param("deterministic", attribute, deterministic)


class Linear(TensorParallel):
    """The linen version of `jax_ub.flax.Linear`, a tensor-parallel linear layer.

    The parameters have the names, global shapes and initial values of
    `flax.linen.Dense`, or with several input or output dimensions those of
    `flax.linen.DenseGeneral`, so both can load each other's checkpoints. Parameters
    have sharding metadata only with `kernel_init=nn.with_partitioning(...)`.

    During initialization, kernels are not sharded and the inputs may have any number of
    tokens. Inside the caller's `jax.shard_map`, the shapes of the shards need not match
    then, so the results are zeros.

    Transformer Engine: `te.Linear`.

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
        """Returns how inputs, kernel and result are sharded over the mesh axes."""
        return ShardingLayout(
            self.parallel,
            self.axis_name,
            self.mesh,
            self.data_axes,
            self.sequence_parallel,
            self.method,
            self.ub_name,
            self.fsdp_axes,
            OverlapFlags.of(self.linear_options()),
            fp8=self.fp8,
        )

    def __call__(
        self, inputs: jax.Array, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes `inputs @ kernel + bias`, adding an optional residual.

        Maps `[..., tokens, *in]` to `[..., tokens, *features]`. The arguments are those
        of `jax_ub.flax.Linear`.

        Raises:
            UnsupportedOverlapError: if `axis` does not name the last dimensions.
            ShapeContractError: if the inputs are not an array with a feature dimension.
        """
        layout, (x, kernel, *others), options = self._call_arguments(inputs)
        if self.is_initializing():
            if layout.is_local():
                return self._zeros(layout, x, kernel.shape, residual, **options)
            layout = dataclasses.replace(layout.replicated(), fp8=None)
            others[1:] = None, None
        parameters = [(each,) for each in (kernel, *others)]
        (y,) = sharded_linear(layout, x, *parameters, residual=residual, **options)
        return y

    @nn.nowrap
    def _zeros(self, layout, x, kernel_shape, residual, num_in):
        """Returns zeros that have the shape and type of the layer's result, for `init`.

        The result is not computed, because the shards of inputs and kernel that a rank
        has during initialization may have different contracting sizes.
        """
        # The kernel of a row-parallel layer may be an FSDP shard, which has only some
        # of the output features. `self.features` has all of them.
        is_column = layout.parallel == "column"
        outs = kernel_shape[num_in:] if is_column else as_sizes(self.features)
        addends = [] if residual is None else [residual]
        dtype = jnp.result_type(x, *addends)
        zeros = jnp.zeros((*x.shape[: x.ndim - num_in], *outs), dtype)
        axes = vma.axes_of(x, *addends)
        if layout.parallel is not None and vma.is_vma_checked(layout.axes):
            is_sharded, own = any(layout.mode.y), layout.axes
            axes = axes.union(own) if is_sharded else axes.difference(own)
        return vma.pcast_varying(zeros, axes)

    @nn.nowrap
    def _call_arguments(
        self, inputs: jax.Array
    ) -> tuple[ShardingLayout, tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `sharded_linear`: layout, operands and options.

        The operands are x, kernel and bias in one dtype, main_grad and FP8 state.
        """
        layout = self.sharding_layout
        checks.check_rank(layout.op, "x", inputs, 1)
        num_in = self._num_in(inputs.ndim)
        kernel, bias, *others = self.parameters(inputs.shape[-num_in:])
        promote_dtype = functools.partial(self.promote_dtype, dtype=self.dtype)
        operands = promoted(layout, promote_dtype, inputs, kernel, bias, num_in)
        return layout, (*operands, *others), {"num_in": num_in}

    @nn.compact
    def parameters(
        self, in_sizes: Sequence[int]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Any]:
        """Declares and returns the layer's kernel, bias, main_grad and FP8 state.

        Bias, main_grad and state are None if they are disabled.
        """
        layout = self.sharding_layout
        out_sizes = read_sizes(layout.op, "features", self.features)
        if layout.is_local():
            mesh = jax.sharding.get_abstract_mesh()
            num_ranks = 1 if layout.parallel is None else layout.axis_size(mesh)
            ins = in_sizes[0] * (num_ranks if layout.parallel == "row" else 1)
            layout.check_features((ins, out_sizes[0]), mesh)
            if layout.parallel == "column":
                out_sizes = (out_sizes[0] // num_ranks, *out_sizes[1:])
        shape = [*in_sizes, *out_sizes]
        shape[layout.fsdp_dim * len(in_sizes)] //= layout.num_manual_fsdp()
        kernel_init = _of_matrix(
            layout.op, "kernel_init", self.kernel_init, len(in_sizes)
        )
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = main_grad = None
        if self.use_bias:
            bias_init = _of_matrix(layout.op, "bias_init", self.bias_init, 0)
            bias = self.param("bias", bias_init, out_sizes, self.param_dtype)
        if self.main_grad:
            main_grad = self.variable(
                OVERWRITE_WITH_GRADIENT, "main_grad", jnp.zeros, shape, jnp.float32
            ).value
        return kernel, bias, main_grad, linen_state(layout.op, self, self.fp8)

    @nn.nowrap
    def _num_in(self, ndim):
        """Returns how many of the `ndim` dimensions of the inputs are contracted."""
        given = as_sizes(self.axis)
        if not given or not all(map(is_integer, given)):
            raise ShapeContractError(
                f"{self.sharding_layout.op}: axis = {shown(self.axis)} is not an "
                "integer or a tuple of them. Pass the contracted dimensions, for "
                "example -1."
            )
        axes = sorted(axis if axis < 0 else axis - ndim for axis in given)
        if axes != list(range(-len(axes), 0)):
            raise UnsupportedOverlapError(
                f"{self.sharding_layout.op}: axis = {self.axis} for inputs of {ndim} "
                "dimensions, but only the last dimensions can be contracted. Use axis "
                f"= {tuple(range(-len(axes), 0))} after jnp.moveaxis."
            )
        return len(axes)


def _of_matrix(op: str, name: str, init: Callable, num_in: int) -> Callable:
    """Wraps an initializer so that it gets the shape [in, out], or [out] for a bias.

    The wrapper reshapes the values, since kernels may have more dimensions. The values
    then depend only on the numbers of inputs and outputs.
    """

    def initialize(key, shape, dtype):
        ins, outs = math.prod(shape[:num_in]), math.prod(shape[num_in:])
        flat = (ins, outs) if num_in else (outs,)
        values = init(key, flat, dtype)
        # jax.tree.leaves returns the array without its metadata. nn.meta.unbox would
        # also apply the sharding in the metadata, which is for an array of the shape
        # `shape`. The array has the shape `flat` until it is reshaped below.
        leaves = jax.tree.leaves(values)
        checks.check_initial(op, name, leaves[0] if len(leaves) == 1 else values, flat)
        # jax.tree.map reshapes the array inside an nn.Partitioned, so its metadata is
        # kept.
        return jax.tree.map(lambda values: values.reshape(shape), values)

    return initialize
