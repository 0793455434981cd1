"""The nnx layer `Linear`, and `MainGrad`, its accumulator of gradients."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.nnx.nn import dtypes, initializers

from jax_ub._src import arguments, checks
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.flax.options import (
    FixedArguments,
    LinearOptions,
    as_sizes,
    promoted,
    read_sizes,
    userbuffers_name,
)
from jax_ub._src.fp8.flax_state import Fp8State
from jax_ub._src.fp8.recipes import DelayedScaling, Recipe, check_layer_recipe
from jax_ub._src.scaled_array import is_scaled
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.sharded_linear import sharded_linear, with_output_sharding
from jax_ub._src.sharding.specs import check_context

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class MainGrad(nnx.Variable):
    """An nnx variable that sums a kernel's f32 gradient over microbatches.

    It has the shape of the kernel. Its cotangent is its new value, `main_grad + dw`,
    and the kernel's cotangent is zero. This is Flax's "overwrite with gradient"
    convention.

    Transformer Engine: the attribute `main_grad` of a weight.
    """


def with_main_grads(gradients: nnx.State, main_grads: nnx.State) -> nnx.State:
    """Replaces the gradient of each kernel by the accumulated `main_grad`.

    Transformer Engine: none. Megatron-LM's optimizer reads `main_grad` itself.

    Args:
        gradients: the gradients of the parameters. They are zero for kernels with a
            `main_grad`.
        main_grads: the model's `MainGrad` variables after the last microbatch, in f32.

    Returns:
        `gradients`, with each `main_grad` as the gradient of its layer's `kernel`.

    Raises:
        ShapeContractError: if an argument is not an `nnx.State`, or `gradients` lacks
            the kernel of a `main_grad`.
    """
    op = "with_main_grads"
    _check_state(op, "gradients", gradients)
    _check_state(op, "main_grads", main_grads)
    flat = dict(nnx.to_flat_state(gradients))
    for path, main_grad in nnx.to_flat_state(main_grads):
        kernel = (*path[:-1], "kernel")
        if kernel not in flat:
            found, wanted = (shown(".".join(map(str, p))) for p in (path, kernel))
            raise ShapeContractError(
                f"{op}: main_grads has {found}, but gradients has no {wanted}. Pass "
                "the gradients of all kernels whose main_grad is passed; if a kernel "
                "is frozen, leave its main_grad out by nnx.filter_state."
            )
        flat[kernel] = flat[kernel].replace(main_grad.get_value())
    return nnx.from_flat_state(flat)


_check_state = checks.option_check(
    lambda value: isinstance(value, nnx.State),
    "an nnx.State",
    "Pass one, as returned by nnx.split.",
)


class Linear(FixedArguments, arguments.KeywordsChecked, nnx.Module):
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

    Transformer Engine: `te.Linear`.

    Attributes:
        kernel: the kernel, `[*in_features, *out_features]`.
        bias: the bias, `[*out_features]`, or None.
        main_grad: the accumulator of the kernel's gradient, or None.
        fp8_state: the state of `DelayedScaling`, or None.
    """

    in_features: int | Sequence[int]
    out_features: int | Sequence[int]
    use_bias: bool
    param_dtype: Any

    _settable = frozenset(
        {"dtype", "precision", "promote_dtype", "preferred_element_type"}
    )
    _flags = frozenset({"main_grad"})
    _set_elsewhere = {
        "use_bias": "Set bias to an nnx.Param, or to None.",
        "main_grad": "Set it to a MainGrad, or to None.",
    }

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
        fp8: Recipe | None = None,
    ):
        """Creates kernel, bias and gradient accumulator, sharded if the mesh is known.

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
            fp8: the FP8 recipe by which the layer quantizes inputs, kernel and
                gradients, such as `ub.fp8.Float8CurrentScaling()`; None computes in
                `dtype`.

        Raises:
            ConfigurationError: if two flags, or a flag and the method, contradict each
                other, or if `fp8` is not a recipe.
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
        check_layer_recipe("Linear", fp8)
        self.sharding_layout = layout = ShardingLayout(
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
            fp8=fp8,
        )
        ins = read_sizes(layout.op, "in_features", in_features)
        outs = read_sizes(layout.op, "out_features", out_features)
        known = layout.find_mesh()
        if known is not None:
            layout.check_features((ins[0], outs[0]), known)
        in_entry, out_entry = layout.kernel_spec
        further = [None] * (len(outs) - 1)
        spec = (in_entry, *[None] * (len(ins) - 1), out_entry, *further)

        def parameter(name, init, metadata, spec, *sizes):
            # The kernel is initialized as a matrix, as in nnx.LinearGeneral, so that
            # its values depend only on the total numbers of input and output features.
            flat = tuple(map(math.prod, sizes))
            values = init(rngs.params(), flat, param_dtype)
            values, metadata = _unboxed(values, metadata)
            checks.check_initial(layout.op, name, values, flat)
            values = values.reshape(sum(sizes, ()))
            metadata = _with_sharding(metadata, spec, layout)
            return _sharded(layout, nnx.Param, values, metadata), metadata

        self.kernel, kernel_metadata = parameter(
            "kernel_init", kernel_init, kernel_metadata, spec, ins, outs
        )
        kernel_spec = nnx.get_partition_spec(self.kernel).get_value()
        layout.check_kernel_spec(kernel_spec, len(ins))
        self.bias = nnx.data(None)
        if use_bias:
            spec = (*layout.bias_spec, *further)
            self.bias, _ = parameter("bias_init", bias_init, bias_metadata, spec, outs)
        self.main_grad = nnx.data(None)
        if main_grad:
            accumulator = jnp.zeros((*ins, *outs), jnp.float32)
            self.main_grad = _sharded(layout, MainGrad, accumulator, kernel_metadata)
        self.fp8_state = (
            Fp8State(fp8) if isinstance(fp8, DelayedScaling) else nnx.data(None)
        )
        self._store(in_features=in_features, out_features=out_features)
        self._store(use_bias=use_bias, param_dtype=param_dtype)
        self.dtype = dtype
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
        layout, (x, *parameters), options = self._call_arguments(inputs)
        parameters = [(each,) for each in parameters]
        (y,) = sharded_linear(layout, x, *parameters, residual=residual, **options)
        return with_output_sharding(y, out_sharding)

    def _call_arguments(
        self, inputs: jax.Array
    ) -> tuple[ShardingLayout, tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `sharded_linear`: layout, operands and options.

        The operands are x, kernel and bias in one dtype, main_grad and FP8 state.
        """
        op = self.sharding_layout.op
        checks.check_array(op, "x", inputs)
        arguments.check(op, promote_dtype=self.promote_dtype)
        num_in = len(as_sizes(self.in_features))
        operands = promoted(
            self.sharding_layout,
            lambda *arrays: self.promote_dtype(arrays, dtype=self.dtype),
            inputs,
            parameter_value(self.kernel),
            None if self.bias is None else parameter_value(self.bias),
            num_in,
        )
        main_grad = None if self.main_grad is None else self.main_grad[...]
        state = None if self.fp8_state is None else self.fp8_state.arrays()
        options = {"num_in": num_in, "out_dtype": self.preferred_element_type}
        return self._call_layout(), (*operands, main_grad, state), options

    def _call_layout(self):
        """Returns the sharding layout, with FSDP axes from the kernel's metadata.

        Inside a `shard_map`, a kernel that has its full size needs no all-gather, so it
        has no FSDP axes.
        """
        ins, outs = as_sizes(self.in_features), as_sizes(self.out_features)
        kernel, layout = self.kernel, self.sharding_layout
        # Layers may be stacked, for example by nnx.vmap. The spec in the metadata then
        # has leading entries for the stacked dimensions, which the kernel of one layer
        # lacks. Only the last entries are used.
        spec: Any = nnx.get_partition_spec(kernel)
        if isinstance(spec, nnx.Variable):  # not if the kernel was set to an array
            spec = spec.get_value()
        spec = tuple(spec or ())[-kernel.ndim :]
        layout = layout.with_fsdp_of(spec, layout.find_mesh(), len(ins))
        dim = layout.fsdp_dim * len(ins)
        is_whole = kernel.shape[dim] == (*ins, *outs)[dim]
        if is_whole and jax.sharding.get_abstract_mesh().manual_axes:
            layout = dataclasses.replace(layout, fsdp_axes=())
        return layout


def parameter_value(parameter: Any) -> Any:
    """Returns the array of a parameter, which is an nnx variable or an array itself.

    Flax gives an array, but no `ScaledArray`, by indexing.
    """
    is_variable = isinstance(parameter, nnx.Variable)
    value = parameter.get_value() if is_variable else parameter
    return value if is_scaled(value) else parameter[...]


def inner_linear(
    in_features: int | Sequence[int],
    out_features: int | Sequence[int],
    parallel: str,
    ub_name: str,
    rngs: nnx.Rngs,
    options: LinearOptions,
) -> Linear:
    """Creates a linear layer with the options of the module that contains it."""
    return Linear(
        in_features,
        out_features,
        parallel=parallel,
        ub_name=userbuffers_name(ub_name, options),
        rngs=rngs,
        **options,
    )


def apply_layers(layers: Sequence[Any], inputs: jax.Array) -> tuple[jax.Array, ...]:
    """Applies several nnx or linen layers to the same inputs, with one all-gather.

    If they differ in more than output sizes and parameters, for example in their
    dtypes, or if only some have a bias, each gathers the inputs. So do layers by which
    the user has replaced a `Linear`.
    """
    is_initializing = isinstance(layers[0], nn.Module) and layers[0].is_initializing()
    if is_initializing or not all(map(_is_linear, layers)):
        return tuple(layer(inputs) for layer in layers)
    calls = [layer._call_arguments(inputs) for layer in layers]
    layouts, operands, options = zip(*calls, strict=True)
    types = {(x.dtype, jax.tree.structure(rest)) for x, *rest in operands}
    are_equal = len(set(layouts)) == 1 and all(each == options[0] for each in options)
    if len(types) > 1 or not are_equal:
        return tuple(layer(inputs) for layer in layers)
    xs, *parameters = zip(*operands, strict=True)
    return sharded_linear(layouts[0], xs[0], *parameters, **options[0])


def apply_with_residual(
    layer: Any, inputs: jax.Array, residual: jax.Array | None
) -> jax.Array:
    """Applies a layer of nnx or linen, and adds the residual, if it is not None.

    A `Linear` adds it in its call. A layer by which the user has replaced it, such as
    an `nnx.LoRA`, may not have the argument.
    """
    if _is_linear(layer):
        return layer(inputs, residual=residual)
    y = layer(inputs)
    return y if residual is None else y + residual


def _is_linear(layer: Any) -> bool:
    """Returns whether `layer` is a `Linear` of jax_ub, or inherits its `__call__`.

    The inner layers of nnx modules may be replaced by other modules, also by subclasses
    of `Linear` that compute something else. Linen modules create their layers.
    """
    return isinstance(layer, nn.Module) or type(layer).__call__ is Linear.__call__


def _unboxed(values, metadata):
    """Separates initial values from metadata that `nnx.with_metadata` has attached."""
    if not isinstance(values, nnx.VariableMetadata):
        return values, metadata
    hooks = {k: v for k, v in vars(values).items() if k.startswith("on_") and v}
    return values.raw_value, {**hooks, **metadata, **values.metadata}


def _sharded(layout, variable_type, array, metadata):
    """Creates an nnx variable, and shards its array over the mesh in `metadata`."""
    try:
        variable = variable_type(array, **metadata)
    except (ValueError, AssertionError):
        # JAX rejects an array over a mesh whose devices or axis types differ from the
        # mesh of jax.set_mesh. The check here names the layer and the meshes, which
        # JAX's error does not.
        if layout.mesh is not None:
            check_context(layout.op, layout.mesh)
        raise
    if metadata.get("mesh") is not None:
        variable.del_metadata("mesh")  # its devices cannot be pickled
    return variable


def _with_sharding(metadata, spec, layout):
    """Adds a partition spec to a parameter's metadata, unless the caller set one."""
    given = {"out_sharding", "sharding", "sharding_names"} & set(metadata)
    if given or not any(layout.kernel_spec):
        return metadata
    added: dict[str, Any] = {"out_sharding": tuple(spec)}
    mesh = layout.find_mesh()
    if jax.sharding.get_abstract_mesh().manual_axes or mesh is None:
        # Flax cannot shard eagerly inside a shard_map or without a mesh. The metadata
        # still keeps the spec, for nnx.get_partition_spec.
        added["eager_sharding"] = False
    elif mesh is layout.mesh:
        added["mesh"] = mesh
    return added | dict(metadata)
