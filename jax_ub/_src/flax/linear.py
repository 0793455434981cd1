"""Tensor-parallel `flax.nnx.Linear` and `flax.nnx.LinearGeneral`."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers

from jax_ub._src import arguments, methods
from jax_ub._src import checks as shapes
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import UnknownArgumentError, nearest, shown
from jax_ub._src.flax.main_grad import MainGrad
from jax_ub._src.flax.together import multiply_promoted, read_sizes, sizes_of
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.sharded_linear import with_output_sharding

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class LinearOptions(TypedDict, total=False):
    """The constructor arguments that a larger module passes to its `Linear` layers."""

    use_bias: bool
    dtype: Any
    param_dtype: Any
    precision: Any
    kernel_init: Any
    bias_init: Any
    promote_dtype: Any
    axis_name: str | tuple[str, ...]
    mesh: jax.sharding.Mesh | None
    data_axes: tuple[str, ...] | None
    sequence_parallel: bool
    method: str | None
    main_grad: bool
    fsdp_axes: tuple[str, ...] | str
    ub_overlap_ag: bool | None
    ub_overlap_rs: bool | None
    ub_overlap_rs_dgrad: bool | None
    ub_bulk_dgrad: bool | None
    ub_bulk_wgrad: bool | None


def check_options(layer: type, options: LinearOptions, **own: Any) -> None:
    """Checks the constructor arguments of a module that contains `Linear` layers.

    Args:
        layer: the module's class, for error messages.
        options: the arguments that the module passes to its linear layers.
        **own: the other arguments of the module.

    Raises:
        ShapeContractError: if an argument has the wrong type.
        UnknownArgumentError: if an option is not in `LinearOptions`.
        UnknownNameError: if the method is unknown, or a flag is not a bool.
        ConfigurationError: if two flags, or a flag and the method, contradict each
            other.
        UnsupportedOverlapError: if a flag is True without sequence parallelism.
    """
    op, known = layer.__name__, LinearOptions.__annotations__
    for name in options:
        if name not in known:
            named = list(inspect.signature(layer).parameters)[:-1]
            raise UnknownArgumentError(
                f"{op}: it has no argument {shown(name)}. "
                f"{nearest(name, [*named, *known])}"
            )
    arguments.check(op, **own, **options)
    OverlapFlags.of(options).check(
        op,
        methods.resolve(op, options.get("method"), None),
        sequence_parallel=options.get("sequence_parallel", True),
    )


def userbuffers_name(name: str, options: LinearOptions) -> str | None:
    """Returns a layer's `ub_name`: `name` with sequence parallelism, else None.

    The overlaps of Transformer Engine that have names are all-gathers and
    reduce-scatters. Without sequence parallelism, the layers communicate by all-reduce.
    """
    return name if options.get("sequence_parallel", True) else None


class Linear(nnx.Module):
    """A tensor-parallel linear layer over the last dimensions of its inputs.

    With sequence parallelism, the GEMM of a "column" layer overlaps with the all-gather
    of its inputs, and the GEMM of a "row" layer with the reduce-scatter of its result.

    The parameters have the names, global shapes and initial values of
    `flax.nnx.Linear`, so both can load each other's checkpoints. With several input or
    output dimensions they are those of `flax.nnx.LinearGeneral` over the last
    dimensions. The first of several dimensions is sharded: for attention heads
    `[heads, head_dim]`, the heads.

    With global arrays, the layer is called like the Flax layer and shards its operands
    over the mesh itself. Inside the caller's `jax.shard_map` it computes on shards:
    split the module with `nnx.split`, pass its state with the specs of
    `nnx.get_partition_spec`, and merge it inside.

    | parallel | x | kernel | y |
    |---|---|---|---|
    | "column" | sharded by tokens, gathered | `[in, out/P]` | sharded by features |
    | "row" | sharded by features | `[in/P, out]` | summed, sharded by tokens |
    | None | any sharding | `[in, out]` | any sharding |

    Attributes:
        kernel: the kernel, `[*in_features, *out_features]`.
        bias: the bias, `[*out_features]`, or None.
        main_grad: the accumulator of the kernel's gradient, or None.
    """

    def __init__(  # noqa: PLR0913, flax.nnx.Linear's arguments and where it runs
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
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
        axis_name: str | tuple[str, ...] = "tp",
        mesh: jax.sharding.Mesh | None = None,
        data_axes: tuple[str, ...] | None = None,
        sequence_parallel: bool = True,
        method: str | None = None,
        ub_name: str | None = None,
        main_grad: bool = False,
        fsdp_axes: tuple[str, ...] | str = (),
        ub_overlap_ag: bool | None = None,
        ub_overlap_rs: bool | None = None,
        ub_overlap_rs_dgrad: bool | None = None,
        ub_bulk_dgrad: bool | None = None,
        ub_bulk_wgrad: bool | None = None,
    ):
        """Creates kernel, bias and main_grad, sharded if the mesh is known.

        Args:
            in_features: the global number of input features, or a tuple of sizes of
                several input dimensions.
            out_features: the global number of output features, or a tuple of sizes of
                several output dimensions.
            use_bias: whether a bias is added.
            dtype: dtype of the computation; None infers it from inputs and parameters.
            param_dtype: dtype of the parameters.
            precision: accepted for compatibility with `flax.nnx.Linear` and ignored.
                Products are always summed in f32.
            kernel_init: initializer of the kernel.
            bias_init: initializer of the bias.
            promote_dtype: function that casts `(inputs, kernel, bias)` to one dtype.
            preferred_element_type: dtype of the result; None takes the dtype of the
                promoted inputs.
            rngs: the PRNG streams for the initializers.
            kernel_metadata: metadata of the kernel. An entry "out_sharding" overrides
                the sharding that `parallel` and `fsdp_axes` imply.
            bias_metadata: metadata of the bias, with the same override.
            parallel: "column", "row" or None.
            axis_name: the tensor-parallel mesh axis, or a tuple of axes that are used
                as one.
            mesh: the mesh; None takes the mesh of `jax.set_mesh` or of the arrays.
            data_axes: the mesh axes that shard the leading axis of the inputs. None
                takes all axes except `axis_name` if their product divides it.
            sequence_parallel: whether tokens are sharded over `axis_name` between the
                layers. If False, a column layer gathers nothing and a row layer
                all-reduces.
            method: how GEMM and communication overlap; None takes `JAX_UB_METHOD` if
                set, else "auto".
            ub_name: the layer's name in `initialize_ub` and in error messages.
            main_grad: whether the kernel's gradient is accumulated into `main_grad`.
            fsdp_axes: the mesh axes that shard the kernel dimension that `parallel`
                does not shard, or the input dimension if `parallel` is None (FSDP).
            ub_overlap_ag: whether to overlap the all-gather of a column layer's input
                in the forward, and of a row layer's output gradient in the dgrad. True
                raises an error if this is not possible; False communicates with plain
                `jax.lax`; None lets jax_ub choose. The following flags take the same
                values.
            ub_overlap_rs: whether to overlap the reduce-scatter of a row layer's
                result.
            ub_overlap_rs_dgrad: whether to overlap the reduce-scatter of a column
                layer's input gradient with its dgrad GEMM.
            ub_bulk_dgrad: whether to overlap the all-gather of a column layer's input
                with its dgrad GEMM.
            ub_bulk_wgrad: whether to overlap the reduce-scatter of a column layer's
                input gradient with its wgrad GEMM. Must equal `ub_bulk_dgrad`.

        Raises:
            ConfigurationError: if two flags, or a flag and the method, contradict each
                other.
            UnsupportedOverlapError: if a flag is True but the layer does not shard
                tokens, or if the bulk flags differ.
            UnknownNameError: if `parallel`, `method` or the axis is unknown.
            ShapeContractError: if a size is not a positive integer, the number of ranks
                does not divide a sharded dimension, or the kernel's metadata shards a
                different dimension than `parallel`.
        """
        arguments.check(
            "Linear",
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            main_grad=main_grad,
        )
        self.sharding_layout = ShardingLayout(
            parallel,
            axis_name,
            mesh,
            data_axes,
            sequence_parallel,
            method,
            ub_name,
            fsdp_axes,
            OverlapFlags(
                ub_overlap_ag,
                ub_overlap_rs,
                ub_overlap_rs_dgrad,
                ub_bulk_dgrad,
                ub_bulk_wgrad,
            ),
        )
        ins = read_sizes(self.sharding_layout.op, "in_features", in_features)
        outs = read_sizes(self.sharding_layout.op, "out_features", out_features)
        known = self.sharding_layout.find_mesh()
        if known is not None:
            self.sharding_layout.check_features((ins[0], outs[0]), known)
        in_entry, out_entry = self.sharding_layout.kernel_spec
        further = [None] * (len(outs) - 1)
        spec = (in_entry, *[None] * (len(ins) - 1), out_entry, *further)
        shape = (*ins, *outs)
        # Initialized as a matrix, as in LinearGeneral: initial values depend only on
        # the numbers of inputs and outputs.
        flat = (math.prod(ins), math.prod(outs))
        kernel = kernel_init(rngs.params(), flat, param_dtype)
        kernel, kernel_metadata = _unboxed(kernel, kernel_metadata)
        shapes.check_initial(self.sharding_layout.op, "kernel_init", kernel, flat)
        kernel_metadata = _with_sharding(kernel_metadata, spec, self.sharding_layout)
        self.kernel = _sharded(nnx.Param, kernel.reshape(shape), kernel_metadata)
        self.sharding_layout.check_kernel_spec(
            nnx.get_partition_spec(self.kernel).get_value(), len(ins)
        )
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), flat[1:], param_dtype)
            bias, bias_metadata = _unboxed(bias, bias_metadata)
            shapes.check_initial(self.sharding_layout.op, "bias_init", bias, flat[1:])
            bias_spec = (*self.sharding_layout.bias_spec, *further)
            bias_metadata = _with_sharding(
                bias_metadata, bias_spec, self.sharding_layout
            )
            self.bias = _sharded(nnx.Param, bias.reshape(outs), bias_metadata)
        self.main_grad = nnx.data(None)
        if main_grad:
            accumulator = jnp.zeros(shape, jnp.float32)
            self.main_grad = _sharded(MainGrad, accumulator, kernel_metadata)

        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding=None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Computes `inputs @ kernel + bias`, adding an optional residual.

        Maps `[..., tokens, *in_features]` to `[..., tokens, *out_features]`.

        Args:
            inputs: the activations.
            out_sharding: the sharding of the result; None keeps the one that `parallel`
                implies.
            residual: array with the shape and the sharding of the result that is added
                to it. A row layer adds it inside its fused call, before rounding.
        """
        (y,) = call_together((self,), inputs, residual)
        return with_output_sharding(y, out_sharding)


def call_together(
    layers: Sequence[Linear], inputs: jax.Array, residual: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Applies several layers to the same inputs, which are gathered only once.

    Returns one result for each layer.

    Args:
        layers: the layers. They may differ only in output sizes and parameters.
        inputs: `[..., tokens, *in_features]`.
        residual: `[..., tokens, *out_features]`; only with a single layer.
    """
    first = layers[0]
    shapes.check_array(first.sharding_layout.op, "x", inputs)
    promoted = []
    for layer in layers:
        bias = None if layer.bias is None else layer.bias[...]
        given = (inputs, layer.kernel[...], bias)
        promote = functools.partial(layer.promote_dtype, given, dtype=layer.dtype)
        promoted.append(arguments.promoted(layer.sharding_layout.op, promote, given))
    all_inputs, kernels, biases = zip(*promoted, strict=True)
    return multiply_promoted(
        _placement_of(first),
        all_inputs,
        kernels,
        [bias for bias in biases if bias is not None],
        [layer.main_grad[...] for layer in layers if layer.main_grad is not None],
        num_in=len(sizes_of(first.in_features)),
        residual=residual,
        out_dtype=first.preferred_element_type,
    )


def _placement_of(layer):
    """Returns the mesh axes over which a layer's inputs, kernel and result are sharded.

    Its FSDP axes are those in the kernel's metadata.
    """
    num_in, kernel = len(sizes_of(layer.in_features)), layer.kernel
    # If layers are stacked, for example by nnx.vmap, the metadata's spec may have more
    # leading entries than the kernel has dimensions.
    spec = tuple(nnx.get_partition_spec(kernel).get_value() or ())[-kernel.ndim :]
    sharding_layout = layer.sharding_layout
    sharding_layout = sharding_layout.with_fsdp_of(
        spec, sharding_layout.find_mesh(), num_in
    )
    dim = sharding_layout.fsdp_dim * num_in
    size = (*sizes_of(layer.in_features), *sizes_of(layer.out_features))[dim]
    in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if in_shard_map and kernel.shape[dim] == size:  # not sharded by FSDP
        sharding_layout = dataclasses.replace(sharding_layout, fsdp_axes=())
    return sharding_layout


def _unboxed(values, metadata):
    """Separates an initializer's values from the metadata that it attached.

    An initializer may be wrapped in `nnx.with_metadata`, which adds metadata and hooks.
    """
    if not isinstance(values, nnx.VariableMetadata):
        return values, metadata
    hooks = {k: v for k, v in vars(values).items() if k.startswith("on_") and v}
    return values.raw_value, {**hooks, **metadata, **values.metadata}


def _sharded(kind, array, metadata):
    """Creates an nnx variable whose array is sharded over the mesh in `metadata`.

    The mesh is then removed from the metadata, because its devices cannot be pickled.
    """
    variable = kind(array, **metadata)
    if metadata.get("mesh") is not None:
        variable.del_metadata("mesh")
    return variable


def _with_sharding(metadata, spec, sharding_layout):
    """Adds a kernel's or bias's spec to its metadata, unless the caller set one."""
    said = {"out_sharding", "sharding", "sharding_names"} & set(metadata)
    if said or not any(sharding_layout.kernel_spec):
        return metadata
    added: dict[str, Any] = {"out_sharding": tuple(spec)}
    if sharding_layout.mesh is not None:
        added["mesh"] = sharding_layout.mesh
    elif sharding_layout.find_mesh() is None or sharding_layout.is_local():
        # Flax cannot shard eagerly without a mesh. The metadata still keeps the spec,
        # for nnx.get_partition_spec.
        added["eager_sharding"] = False
    return added | dict(metadata)
