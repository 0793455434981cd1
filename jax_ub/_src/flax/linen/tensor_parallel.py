"""Base class of the linen modules that contain tensor-parallel layers."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype

from jax_ub._src import arguments
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.flax.linear import LinearOptions
from jax_ub._src.sharding import portable_mesh


class TensorParallel(nn.Module, kw_only=True):
    """Base class of modules that are, or contain, tensor-parallel linear layers.

    The following arguments are keyword-only.

    Attributes:
        use_bias: whether a bias is added.
        dtype: dtype of the computation; None infers it from inputs and parameters.
        param_dtype: dtype of the parameters.
        precision: accepted for compatibility with Flax and ignored. Products are always
            summed in f32.
        kernel_init: initializer of the kernels. It is called with the shape
            `[in, out]`, also for kernels with more dimensions.
        bias_init: initializer of the biases. It is called with the shape `[out]`.
        promote_dtype: function that casts inputs, kernel and bias to one dtype.
        axis_name: the tensor-parallel mesh axis, or a tuple of axes that are used as
            one.
        mesh: the mesh; None takes the mesh of `jax.set_mesh` or of the arrays.
        data_axes: the mesh axes that shard the leading axis of the inputs. None takes
            all axes except `axis_name` if their product divides it.
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
            If False, a column layer gathers nothing and a row layer all-reduces.
        method: how GEMMs and communication overlap; None takes `JAX_UB_METHOD` if set,
            else "auto".
        main_grad: whether a kernel's gradient is accumulated into the f32 variable
            `main_grad` of the collection "_overwrite_with_gradient". The cotangent of
            `main_grad` is then its new value, and the cotangent of the kernel is zero.
        fsdp_axes: the mesh axes that shard the kernel dimensions that a layer's
            `parallel` does not shard, or the input dimension if `parallel` is None
            (FSDP).
        ub_overlap_ag: whether to overlap the all-gather of a column layer's input in
            the forward, and of a row layer's output gradient in the dgrad. True raises
            an error if this is not possible; False communicates with plain `jax.lax`;
            None lets jax_ub choose. The following flags take the same values.
        ub_overlap_rs: whether to overlap the reduce-scatter of a row layer's result.
        ub_overlap_rs_dgrad: whether to overlap the reduce-scatter of a column layer's
            input gradient with its dgrad GEMM.
        ub_bulk_dgrad: whether to overlap the all-gather of a column layer's input with
            its dgrad GEMM.
        ub_bulk_wgrad: whether to overlap the reduce-scatter of a column layer's input
            gradient with its wgrad GEMM. Must equal `ub_bulk_dgrad`.
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
        """The `ub_overlap_*` and `ub_bulk_*` arguments, which enable each overlap."""
        return OverlapFlags.of(self.linear_options())

    def __post_init__(self):
        """Checks the types of the constructor arguments."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        arguments.check(type(self).__name__, **options)
        super().__post_init__()

    @nn.nowrap
    def __getstate__(self):
        """Returns the attributes for pickling, with meshes in a picklable form."""
        return portable_mesh.pack(vars(self))

    @nn.nowrap
    def __setstate__(self, state):
        """Restores pickled attributes; meshes get the devices of this process."""
        vars(self).update(portable_mesh.unpack(state))

    @nn.nowrap
    def linear_options(self) -> LinearOptions:
        """Returns the arguments that this module passes to its linear layers."""
        names = LinearOptions.__annotations__
        return cast(LinearOptions, {name: getattr(self, name) for name in names})
