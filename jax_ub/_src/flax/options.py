"""Options that the nnx and linen layers share: their checks, activations, norms, sizes.

`Linear` documents the options of `LinearOptions`.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_ub._src import arguments, checks, methods
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.fp8.recipes import Recipe, check_layer_recipe
from jax_ub._src.scalars import is_number, is_size
from jax_ub._src.scaled_array import MXFP8_BLOCK, ScaledArray, is_scaled, source_of
from jax_ub._src.sharding.layout import ShardingLayout, resolve_parallel


class LinearOptions(TypedDict, total=False):
    """Constructor arguments that a larger module passes to its `Linear` layers."""

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
    fp8: Recipe | None


class FixedArguments(arguments.FixedArguments):
    """Base class of nnx layers with constructor arguments that cannot be reassigned."""

    _unpacked = frozenset(LinearOptions.__annotations__)


def check_options(layer: type, options: LinearOptions, **own: Any) -> None:
    """Checks the constructor arguments of a module that contains `Linear` layers."""
    op, known = layer.__name__, LinearOptions.__annotations__
    named = arguments.named_parameters(layer)
    arguments.check_names(op, options, [*named, *known])
    arguments.check(op, **own, **options)
    check_layer_recipe(op, options.get("fp8"))
    check_flags(op, options)


def check_flags(op: str, options: LinearOptions) -> None:
    """Raises an error if a module's `ub_*` overlap flags contradict its other options.

    The module passes the flags to its linear layers.
    """
    OverlapFlags.of(options).check(
        op,
        methods.resolve(op, options.get("method"), None),
        sequence_parallel=options.get("sequence_parallel", True),
    )


def _check_quantized(
    op: str, fp8: Recipe | None, kernel: Any, bias: Any, num_in: int
) -> None:
    """Raises an error if the bias is FP8, or if the kernel is FP8 without a recipe.

    With a recipe, the kernel may come from `quantize_params`. Its scales must fit the
    `num_in` dimensions that the layer contracts.
    """
    if is_scaled(kernel) and fp8 is not None:
        _check_scales(op, kernel, num_in)
        kernel = None
    for name, parameter in (("kernel", kernel), ("bias", bias)):
        if is_scaled(parameter):
            raise ShapeContractError(
                f"{op}: {name} is a ub.ScaledArray, but a layer takes the array that "
                f"was quantized. Pass {name}.source; with fp8=recipe, the layer "
                "quantizes its kernel itself."
            )


def _check_scales(op, kernel, num_in):
    """Raises an error if scales of columns or blocks do not fit a kernel [*in, *out].

    Scales of columns have size 1 in the `num_in` input dimensions, and blocks are along
    the last of them.
    """
    if kernel.scaling == "tensor":
        return
    ins, outs = kernel.shape[:num_in], kernel.shape[num_in:]
    if kernel.scaling == "block":
        wanted = (*ins[:-1], ins[-1] // MXFP8_BLOCK, *outs)
    else:
        wanted = (1,) * num_in + outs
    if kernel.scales.shape != wanted:
        raise ShapeContractError(
            f"{op}: kernel is a ub.ScaledArray of shape {kernel.shape} with scales of "
            f"shape {kernel.scales.shape}, but the layer takes scales of shape "
            f"{wanted}. Let select of ub.fp8.quantize_params return {num_in}, the "
            "number of contracted dimensions, or pass kernel.source, which the layer "
            "quantizes itself."
        )


def promoted(
    layout: ShardingLayout,
    promote_dtype: Callable[..., Any],
    x: Any,
    kernel,
    bias,
    num_in: int,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Casts x, kernel and bias by `promote_dtype`, and checks arguments and results.

    An FP8 kernel keeps its values, and its source is cast.
    """
    op = layout.op
    _check_quantized(op, layout.fp8, kernel, bias, num_in)
    given = (x, source_of(kernel), bias)
    try:
        arrays = promote_dtype(*given)
    except (TypeError, ValueError) as error:
        dtypes = [str(array.dtype) for array in given if array is not None]
        raise ShapeContractError(
            f"{op}: promote_dtype failed for inputs, kernel and bias of {dtypes}: "
            f"{shown(str(error))}. Convert the inputs, or pass dtype=."
        ) from error
    fits = isinstance(arrays, tuple | list) and len(arrays) == len(given)
    if not fits or not all(
        after is None if before is None else checks.is_array(after)
        for before, after in zip(given, arrays, strict=True)
    ):
        raise ShapeContractError(
            f"{op}: promote_dtype returned {shown(arrays)}, not an array for each of "
            f"the {len(given)} that it was given. Pass a function as in flax."
        )
    x, source, bias = arrays
    if is_scaled(kernel):
        return x, ScaledArray(kernel.values, kernel.scales, source), bias
    return x, source, bias


def userbuffers_name(name: str, options: LinearOptions) -> str | None:
    """Returns the name by which `initialize_ub` configures a layer, or None.

    It is None without sequence parallelism, because an all-reduce has no named overlap.
    """
    return name if options.get("sequence_parallel", True) else None


# Activations.


def quick_gelu(x: jax.Array) -> jax.Array:
    """Computes `x * sigmoid(1.702 x)` elementwise, an approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


# Maps Transformer Engine's activation names to (function, is_gated). A gated activation
# computes `function(x @ w1) * (x @ w2)` with two kernels.
ACTIVATIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], bool]] = {
    "gelu": (jax.nn.gelu, False),
    "qgelu": (quick_gelu, False),
    "relu": (jax.nn.relu, False),
    "srelu": (squared_relu, False),
    "silu": (jax.nn.silu, False),
    "geglu": (jax.nn.gelu, True),
    "qgeglu": (quick_gelu, True),
    "reglu": (jax.nn.relu, True),
    "sreglu": (squared_relu, True),
    "swiglu": (jax.nn.silu, True),
}


def is_named_activation(activation: Callable[[jax.Array], jax.Array]) -> bool:
    """Returns whether a function is one of Transformer Engine's named activations."""
    return any(activation is function for function, _ in ACTIVATIONS.values())


def resolve_activation(
    op: str, activation: str | Callable[[jax.Array], jax.Array]
) -> tuple[Callable[[jax.Array], jax.Array], bool]:
    """Returns (function, is_gated) for an activation, given as a name or function."""
    if callable(activation):
        return activation, False
    _check_known(op, "activation", activation, ACTIVATIONS, " Or pass a function.")
    return ACTIVATIONS[activation]


def _check_known(
    op: str, name: str, value: Any, known: Collection[str], hint: str = ""
) -> None:
    """Raises an error unless an option's value is one of the names in `known`."""
    if not isinstance(value, str) or value not in known:
        raise UnknownNameError(
            f"{op}: {name} = {shown(value)} is not known. {nearest(value, known)}{hint}"
        )


# Normalization layers. The functions below take `flax.nnx` or `flax.linen` as
# `library`; both use the same names for norms.


def make_norm(
    library: Any,
    op: str,
    normalization: str,
    epsilon: float,
    options: LinearOptions,
    *num_features: int,
    **keywords: Any,
) -> Any:
    """Creates the `LayerNorm` or `RMSNorm` of a layer, with the layer's dtypes."""
    checks.check_epsilon(op, "epsilon", epsilon)
    _check_known(op, "normalization", normalization, ("LayerNorm", "RMSNorm"))
    norm, dtypes = _norm_class(library, normalization), norm_dtypes(options)
    return norm(*num_features, epsilon=epsilon, **dtypes, **keywords)


@functools.cache
def _norm_class(library, name):
    """Returns a norm class of Flax. For linen, `nn.remat` wraps it to save memory."""
    norm = getattr(library, name)
    return nn.remat(norm) if library is nn else norm


def norm_dtypes(options: LinearOptions) -> dict[str, Any]:
    return {
        "dtype": options.get("dtype"),
        "param_dtype": options.get("param_dtype", jnp.float32),
    }


def qk_norm_class(
    op: str, qk_norm_type: str | None, normalize_qk: bool, library: Any
) -> Callable[..., Any] | None:
    """Returns the constructor of the norm of queries and keys, or None for no norm.

    `qk_norm_type` is Transformer Engine's argument, and `normalize_qk`, which means
    "LayerNorm", is Flax's.
    """
    checks.check_flag(op, "normalize_qk", normalize_qk)
    if qk_norm_type is not None:
        known, hint = ("RMSNorm", "LayerNorm"), " None normalizes nothing."
        _check_known(op, "qk_norm_type", qk_norm_type, known, hint)
    if qk_norm_type is not None and normalize_qk:
        raise ConfigurationError(
            f'{op}: qk_norm_type = "{qk_norm_type}" and normalize_qk = True, which is '
            'Flax\'s name for qk_norm_type="LayerNorm". Leave normalize_qk out.'
        )
    if qk_norm_type == "RMSNorm":
        return _norm_class(library, "RMSNorm")
    if qk_norm_type is None and not normalize_qk:
        return None
    return functools.partial(_norm_class(library, "LayerNorm"), use_bias=False)


def check_norm_parallel(op: str, parallel: str | None) -> None:
    """Raises an error if the linear layer after a norm is row-parallel.

    A row-parallel layer's input is sharded by features, but a norm needs all features
    of a token on one rank.
    """
    if parallel is not None and resolve_parallel(op, "parallel", parallel) == "row":
        raise UnsupportedOverlapError(
            f'{op}: parallel = "row" shards the features, but a norm needs all '
            'features of a token. Use parallel="column", or a separate norm before '
            "the layers that shard the features."
        )


def check_norm_inputs(op: str, num_features: int, inputs: jax.Array, norm: Any) -> None:
    """Raises an error unless the features and the dtype of the inputs fit the norm.

    `norm` has the attributes `dtype` and `param_dtype`.
    """
    checks.check_array(op, "inputs", inputs)
    if inputs.shape[-1:] != (num_features,):
        raise ShapeContractError(
            f"{op}: inputs have shape {inputs.shape}, but the norm has {num_features} "
            f"features. Pass [..., tokens, {num_features}]: all features of a token."
        )
    if norm.dtype is not None:
        return
    try:
        jnp.promote_types(inputs.dtype, norm.param_dtype)
    except ValueError as error:
        raise ShapeContractError(
            f"{op}: inputs are {inputs.dtype}, which has no common dtype with the "
            f"norm's parameters, {jnp.dtype(norm.param_dtype)}. Convert the inputs, or "
            "pass dtype=."
        ) from error


# Sizes.


def as_sizes(features: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(features) if isinstance(features, Sequence) else (features,)


def read_sizes(op: str, name: str, features: int | Sequence[int]) -> tuple[int, ...]:
    """Converts an integer or a sequence of sizes to a tuple, after checking them."""
    sizes = as_sizes(features)
    if not sizes or not all(map(is_size, sizes)):
        raise ShapeContractError(
            f"{op}: {name} = {shown(features)} is not a positive integer or a tuple of "
            "them. Pass the global size, or one size for each dimension."
        )
    return sizes


def check_attention_sizes(
    num_heads: int, num_kv_heads: int, qkv_features: int, rotary_base: float | None
) -> None:
    """Raises an error if an attention layer's features do not divide into its heads.

    The heads must divide the features, and the key heads the query heads. Rotary
    embeddings need an even number of features per head.
    """
    op = "MultiHeadAttention"
    checks.check_size(op, "num_heads", num_heads)
    checks.check_size(op, "num_kv_heads", num_kv_heads)
    checks.check_size(op, "qkv_features", qkv_features)
    _check_heads(op, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if qkv_features % num_heads:
        raise ShapeContractError(
            f"{op}: qkv_features = {qkv_features} is not a multiple of num_heads = "
            f"{num_heads}. Use qkv_features = "
            f"{checks.round_up(qkv_features, num_heads)}."
        )
    check_rotary_base(op, rotary_base)
    head_dim = qkv_features // num_heads
    if rotary_base is not None and head_dim % 2:
        raise ShapeContractError(
            f"{op}: qkv_features = {qkv_features} gives {num_heads} heads of "
            f"{head_dim} features, but rotary embeddings rotate pairs of features. Use "
            f"qkv_features = {num_heads * (head_dim + 1)}."
        )


def check_rotary_base(op: str, rotary_base: float | None) -> None:
    if rotary_base is None:
        return
    if not is_number(rotary_base) or not rotary_base > 0:
        raise ShapeContractError(
            f"{op}: rotary_base = {shown(rotary_base)} is not a positive number. Pass "
            "one, for example 10000.0, or None for no rotary embeddings."
        )


def _check_heads(op: str, **numbers: int) -> None:
    """Raises an error unless all key heads serve equally many query heads."""
    (name, num_heads), (kv_name, num_kv_heads) = numbers.items()
    if num_heads % num_kv_heads:
        raise ShapeContractError(
            f"{op}: {name} = {num_heads} is not a multiple of {kv_name} = "
            f"{num_kv_heads}. Each key head serves equally many query heads: use "
            f"{name} = {checks.round_up(num_heads, num_kv_heads)}."
        )


def check_transformer_sizes(
    hidden_size: int,
    num_attention_heads: int,
    num_gqa_groups: int | None,
    kv_channels: int | None,
) -> None:
    """Raises an error if a transformer layer's features do not divide into its heads.

    The heads must divide `hidden_size`, unless `kv_channels` is the size of a head, and
    the key heads (`num_gqa_groups`) must divide the query heads.
    """
    op = "TransformerLayer"
    checks.check_size(op, "hidden_size", hidden_size)
    checks.check_size(op, "num_attention_heads", num_attention_heads)
    if num_gqa_groups is not None:
        checks.check_size(op, "num_gqa_groups", num_gqa_groups)
        _check_heads(
            op, num_attention_heads=num_attention_heads, num_gqa_groups=num_gqa_groups
        )
    if kv_channels is not None:
        checks.check_size(op, "kv_channels", kv_channels)
    elif hidden_size % num_attention_heads:
        padded = checks.round_up(hidden_size, num_attention_heads)
        raise ShapeContractError(
            f"{op}: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {num_attention_heads}. Use hidden_size = {padded}, "
            "or pass kv_channels, the number of features of a head."
        )
