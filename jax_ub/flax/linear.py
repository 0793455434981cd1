"""`flax.nnx.Linear` and `LinearGeneral`, tensor parallel."""

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

from jax_ub import arguments, methods, shapes
from jax_ub.errors import UnknownArgumentError, nearest, shown
from jax_ub.flax.main_grad import MainGrad
from jax_ub.flax.together import multiply_promoted, read_sizes, sizes_of
from jax_ub.overlap_config.flags import OverlapFlags
from jax_ub.retrofit.sharded_linear import with_output_sharding
from jax_ub.retrofit.sharding_layout import ShardingLayout

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class LinearOptions(TypedDict, total=False):
    """The arguments of `Linear` that all linear layers of a larger module share."""

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
    """Checks a larger module's arguments and those that it passes to its linear layers.

    Args:
        layer: the module, for errors.
        options: the arguments that it passes on.
        **own: its own arguments.

    Raises:
        ShapeContractError: if an argument has another type.
        UnknownArgumentError: if `Linear` does not take one of them there.
        UnknownNameError: if there is no such method, or a flag is neither true nor
            false.
        ConfigurationError: if flags, or a flag and the method, contradict.
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
    """The name of one of Transformer Engine's overlaps, where the layer has one.

    They are all-gathers and reduce-scatters; without sequence parallelism there are
    all-reduces.
    """
    return name if options.get("sequence_parallel", True) else None


class Linear(nnx.Module):
    """A linear layer over the last dimension, in the layout of `parallel`.

    It has the parameters of `flax.nnx.Linear`, with the same names, global shapes and
    initial values, so that checkpoints swap; and with several in or out dimensions
    those of `flax.nnx.LinearGeneral` over the last ones, of which the first is sharded:
    attention heads, of `[heads, head_dim]`. On global arrays it is called like that
    layer, and lays its arrays out on the mesh by itself. Inside the caller's
    `jax.shard_map` it works on shards: split the module with `nnx.split`, pass its
    state with the specs of `nnx.get_partition_spec`, and merge it inside.

    | parallel | x | kernel | y |
    |---|---|---|---|
    | "column" | tokens sharded, gathered here | `[in, out/P]` | features sharded |
    | "row" | features sharded | `[in/P, out]` | summed, tokens sharded |
    | None | as it comes | `[in, out]` | as it comes |

    Attributes:
        kernel: `[*in_features, *out_features]`.
        bias: `[*out_features]` or None.
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
        """Creates the parameters, sharded where a mesh is known.

        Args:
            in_features: the global number of input features, or sizes of several
                dimensions.
            out_features: the same of the output.
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
                layout that `parallel` and `fsdp_axes` give.
            bias_metadata: the same for the bias.
            parallel: "column", "row" or None.
            axis_name: the tensor-parallel mesh axis, or several taken as one.
            mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
            data_axes: the mesh axes that shard the leading axis of the inputs. None
                takes all axes but `axis_name`, where their product divides it.
            sequence_parallel: whether tokens are sharded over `axis_name` between the
                layers; otherwise a column layer gathers nothing and a row layer
                all-reduces.
            method: how it runs; None is `JAX_UB_METHOD`, or "auto".
            ub_name: the layer's name: in errors, and in `initialize_ub`.
            main_grad: whether the kernel's gradient is accumulated into `main_grad`.
            fsdp_axes: the mesh axes that shard the kernel's other dimension, or the in
                dimension where `parallel` is None (FSDP).
            ub_overlap_ag: whether the all-gather of a column layer's input, forward,
                and of a row layer's output gradient, in its dgrad, overlaps. True
                overlaps it or fails, False runs it by plain `jax.lax`, None leaves
                the choice to jax_ub; so do the flags that follow.
            ub_overlap_rs: the same of the reduce-scatter of a row layer's result.
            ub_overlap_rs_dgrad: the same of the reduce-scatter of a column layer's
                input gradient, with its dgrad GEMM.
            ub_bulk_dgrad: the same of the all-gather of a column layer's input, beside
                its dgrad GEMM.
            ub_bulk_wgrad: the same of the reduce-scatter of a column layer's input
                gradient, beside its wgrad GEMM; equal to `ub_bulk_dgrad`.

        Raises:
            ConfigurationError: if flags, or a flag and the method, contradict.
            UnsupportedOverlapError: if a flag is True and the layer is not parallel
                over tokens, or one bulk flag differs from the other.
            UnknownNameError: if there is no such `parallel`, `method` or axis.
            ShapeContractError: if a size is no positive integer, a sharded dimension
                does not divide into the ranks, or the kernel's metadata shards the
                other one.
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
        # Initial values depend on the number of inputs and outputs alone.
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
        """Maps `[..., tokens, *in_features]` to `[..., tokens, *out_features]`.

        Args:
            inputs: the activations.
            out_sharding: where the result goes, from where `parallel` leaves it.
            residual: what is added to the result, of its shape and place; a row layer
                does that inside the call, and rounds once.
        """
        (y,) = call_together((self,), inputs, residual)
        return with_output_sharding(y, out_sharding)


def call_together(
    layers: Sequence[Linear], inputs: jax.Array, residual: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Calls layers of one kind on the same inputs, which are gathered once for all.

    Args:
        layers: the layers; they differ in their out dimensions and parameters only.
        inputs: `[..., tokens, *in_features]`.
        residual: `[..., tokens, *out_features]` or None, for one layer.
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
    """That of the layer, on the FSDP axes that its kernel's metadata names."""
    num_in, kernel = len(sizes_of(layer.in_features)), layer.kernel
    # Kernels of stacked layers may have names for axes in front of theirs.
    spec = tuple(nnx.get_partition_spec(kernel).get_value() or ())[-kernel.ndim :]
    sharding_layout = layer.sharding_layout
    sharding_layout = sharding_layout.with_fsdp_of(
        spec, sharding_layout.find_mesh(), num_in
    )
    dim = sharding_layout.fsdp_dim * num_in
    size = (*sizes_of(layer.in_features), *sizes_of(layer.out_features))[dim]
    in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if in_shard_map and kernel.shape[dim] == size:  # the caller keeps it whole there
        sharding_layout = dataclasses.replace(sharding_layout, fsdp_axes=())
    return sharding_layout


def _unboxed(values, metadata):
    """Takes values, and metadata of theirs, out of what `nnx.with_metadata` returns."""
    if not isinstance(values, nnx.VariableMetadata):
        return values, metadata
    hooks = {k: v for k, v in vars(values).items() if k.startswith("on_") and v}
    return values.raw_value, {**hooks, **metadata, **values.metadata}


def _sharded(kind, array, metadata):
    """Makes a variable, which Flax shards on the mesh among its metadata.

    The mesh is not kept: its devices do not pickle.
    """
    variable = kind(array, **metadata)
    if metadata.get("mesh") is not None:
        variable.del_metadata("mesh")
    return variable


def _with_sharding(metadata, spec, sharding_layout):
    """Adds `spec` to a variable's metadata, where the caller says nothing else."""
    said = {"out_sharding", "sharding", "sharding_names"} & set(metadata)
    if said or not any(sharding_layout.kernel_spec):
        return metadata
    added: dict[str, Any] = {"out_sharding": tuple(spec)}
    if sharding_layout.mesh is not None:
        added["mesh"] = sharding_layout.mesh
    elif sharding_layout.find_mesh() is None or sharding_layout.is_local():
        # Flax refuses to shard without a mesh; the layout is worth noting all the same.
        added["eager_sharding"] = False
    return added | dict(metadata)
