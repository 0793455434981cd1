"""What all modules here have in common."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype

from jax_ub import arguments
from jax_ub.flax.linear import LinearOptions
from jax_ub.overlap_config.flags import OverlapFlags
from jax_ub.retrofit import portable_mesh


class TensorParallel(nn.Module, kw_only=True):
    """A module that is, or is made of, linear layers over the ranks of a mesh axis.

    All arguments that follow are given by name.

    Attributes:
        use_bias: whether a bias is added.
        dtype: dtype of the computation; None infers it from inputs and parameters.
        param_dtype: dtype of the parameters.
        precision: taken for Flax's sake: sums are made in f32 anyway.
        kernel_init: initializer of the kernels, of shape `[in, out]` where they have
            several dimensions.
        bias_init: initializer of the biases `[out]`.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        axis_name: the tensor-parallel mesh axis, or several taken as one.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        data_axes: the mesh axes that shard the leading axis of the inputs. None takes
            all axes but `axis_name`, where their product divides it.
        sequence_parallel: whether tokens are sharded over `axis_name` between layers;
            otherwise a column layer gathers nothing and a row layer all-reduces.
        method: how the layers run; None is `JAX_UB_METHOD`, or "auto".
        main_grad: whether a kernel's gradient is accumulated into the f32 variable
            `main_grad` of the collection "_overwrite_with_gradient", whose cotangent is
            its new value; that of the kernel is zero.
        fsdp_axes: the mesh axes that shard the kernels' other dimensions, or the in
            dimension where a layer is not parallel (FSDP).
        ub_overlap_ag: whether the all-gather of a column layer's input, forward, and of
            a row layer's output gradient, in its dgrad, overlaps. True overlaps it or
            fails, False runs it by plain `jax.lax`, None leaves the choice to jax_ub;
            so do the flags that follow.
        ub_overlap_rs: the same of the reduce-scatter of a row layer's result.
        ub_overlap_rs_dgrad: the same of the reduce-scatter of a column layer's input
            gradient, with its dgrad GEMM.
        ub_bulk_dgrad: the same of the all-gather of a column layer's input, beside its
            dgrad GEMM.
        ub_bulk_wgrad: the same of the reduce-scatter of a column layer's input
            gradient, beside its wgrad GEMM; equal to `ub_bulk_dgrad`.
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

    @property
    def overlap_flags(self) -> OverlapFlags:
        """Which communication overlaps."""
        return OverlapFlags.of(self.linear_options())

    def __post_init__(self):
        """Checks the options by their names, as the nnx layers do."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        arguments.check(type(self).__name__, **options)
        super().__post_init__()

    @nn.nowrap
    def __getstate__(self):
        """Returns the attributes, with meshes that pickle."""
        return portable_mesh.pack(vars(self))

    @nn.nowrap
    def __setstate__(self, state):
        """Restores the attributes, with the devices of this process."""
        vars(self).update(portable_mesh.unpack(state))

    @nn.nowrap
    def linear_options(self) -> LinearOptions:
        """The arguments above, for the linear layers of this module."""
        names = LinearOptions.__annotations__
        return cast(LinearOptions, {name: getattr(self, name) for name in names})
