"""FP8 recipes, which select formats and scaling, and the formulas of the scales."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ub._src.arguments import KeywordsChecked
from jax_ub._src.checks import check_flag
from jax_ub._src.errors import (
    ConfigurationError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.scalars import is_integer, is_number

INPUT, KERNEL, OUTPUT_GRAD = ROLES = ("input", "kernel", "output_grad")
# Upper bound of the inverse of an FP8 scale. It keeps scales at or above 2^-126, the
# smallest normal f32 number. XLA:CPU replaces smaller numbers, which are subnormal, by
# zero.
_LARGEST_INVERSE = 2.0**126
_SIGNIFICAND_BITS = 23  # of an f32 number


class Format(enum.Enum):
    """The FP8 dtypes that a recipe uses in the forward and the backward pass.

    `E4M3` uses float8_e4m3fn in both passes. `HYBRID` uses float8_e5m2, which has a
    larger range, for gradients. `E5M2` exists for completeness; no recipe takes it.

    Transformer Engine: `transformer_engine.common.recipe.Format`.
    """

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    def dtype(self, role: str) -> np.dtype:
        """Returns the FP8 dtype of an input, a kernel or an output gradient.

        Args:
            role: "input", "kernel" or "output_grad".
        """
        is_gradient = role == OUTPUT_GRAD
        if self is Format.E5M2 or (self is Format.HYBRID and is_gradient):
            return np.dtype(jnp.float8_e5m2)
        return np.dtype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class QParams(KeywordsChecked):
    """Options of `Float8CurrentScaling` to compute the scale of one kind of operand.

    Transformer Engine: `transformer_engine.common.recipe.QParams`.

    Attributes:
        power_2_scale: whether the scale is rounded to a power of two. None takes
            `use_power_2_scales` of the recipe.
        amax_epsilon: the smallest amax; smaller ones, including zero, become this one.

    Raises:
        UnknownNameError: if `power_2_scale` is not a bool or None.
        ConfigurationError: if `amax_epsilon` is not a number of 0 or more.
    """

    power_2_scale: bool | None = None
    amax_epsilon: float = 0.0

    def __post_init__(self):
        if self.power_2_scale is not None:
            check_flag("QParams", "power_2_scale", self.power_2_scale)
        if not is_number(self.amax_epsilon) or self.amax_epsilon < 0:
            raise ConfigurationError(
                f"QParams: amax_epsilon = {shown(self.amax_epsilon)} is not a number "
                "of 0 or more. Pass one, for example 1e-12."
            )


@dataclasses.dataclass(frozen=True)
class MMParams(KeywordsChecked):
    """Options of `Float8CurrentScaling` for the precision of sums in FP8 GEMMs.

    Transformer Engine: `transformer_engine.common.recipe.MMParams`.

    Attributes:
        use_split_accumulator: whether sums must be f32. False allows the fast
            accumulation of Ada and Hopper GPUs, which jax_ub never uses.

    Raises:
        UnknownNameError: if `use_split_accumulator` is not a bool.
    """

    use_split_accumulator: bool = True

    def __post_init__(self):
        check_flag("MMParams", "use_split_accumulator", self.use_split_accumulator)


@dataclasses.dataclass(frozen=True)
class DelayedScaling(KeywordsChecked):
    """FP8 recipe with one scale per tensor, from the largest values of earlier steps.

    The cast does not wait for the maximum of the tensor. The recipe has a state
    (`ub.fp8.init_state`): for each tensor a history of its amax, the largest absolute
    value, and the scale. The scale of a step is `amax / (max * 2**-margin)`, where
    `amax` is that of the history before the step and `max` is the largest number of
    the format. It does not change if this amax is zero, infinite or NaN.

    Transformer Engine: `transformer_engine.common.recipe.DelayedScaling`.

    Attributes:
        margin: power of two by which values stay below the largest number.
        fp8_format: formats of forward and backward pass.
        amax_history_len: number of steps in the history.
        amax_compute_algo: "max" (of the history), "most_recent" (the last step), or a
            function of the history, f32 `[amax_history_len]`, that returns the amax.
        scaling_factor_compute_algo: None, or a function (amax, scale, fp8_max, recipe)
            that returns the new scale. As in Transformer Engine, its scales multiply a
            tensor before the cast; the state stores the inverse.
        reduce_amax: whether the amax is the maximum over all mesh axes over which the
            tensor varies. If false, only over the axes in `axis_name`.
        fp8_dpa: must be false; attention runs in the dtype of the model.
        fp8_mha: must be false, for the same reason.
        backward_override: must be None; gradients multiply FP8 operands, too.

    Raises:
        ConfigurationError: if the margin, the format, the length of the history or
            `scaling_factor_compute_algo` is invalid.
        UnknownNameError: if `amax_compute_algo` or a flag is invalid.
        UnsupportedOverlapError: if `fp8_dpa` or `fp8_mha` is true, or
            `backward_override` is not None.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self):
        _check_format(self)
        _check_margin(self)
        length = self.amax_history_len
        if not is_integer(length) or length < 1:
            raise ConfigurationError(
                f"DelayedScaling: amax_history_len = {shown(length)} is not a positive "
                "integer. Pass the number of steps, for example 1024."
            )
        algo = self.amax_compute_algo
        is_name = isinstance(algo, str) and algo in AMAX_ALGORITHMS
        if not callable(algo) and not is_name:
            raise UnknownNameError(
                f"DelayedScaling: amax_compute_algo = {shown(algo)} is not a way to "
                f"compute the amax. {nearest(algo, AMAX_ALGORITHMS)} A function of the "
                "history is one, too."
            )
        scaling = self.scaling_factor_compute_algo
        if scaling is not None and not callable(scaling):
            raise ConfigurationError(
                f"DelayedScaling: scaling_factor_compute_algo = {shown(scaling)} is "
                "not a function. Pass one of (amax, scale, fp8_max, recipe), or None."
            )
        check_flag("DelayedScaling", "reduce_amax", self.reduce_amax)
        _check_precision(self)


AMAX_ALGORITHMS = ("max", "most_recent")


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(KeywordsChecked):
    """FP8 recipe with one scale per tensor, from its current largest absolute value.

    The scale is `amax / max`, where `max` is the largest number of the format. It is 1
    if the amax is zero, infinite or NaN.

    Transformer Engine: `transformer_engine.common.recipe.Float8CurrentScaling`.

    Attributes:
        use_power_2_scales: whether scales are rounded up to powers of two.
        fp8_format: formats of forward and backward pass.
        fp8_quant_fwd_inp: parameters of activations.
        fp8_quant_fwd_weight: parameters of kernels.
        fp8_quant_bwd_grad: parameters of gradients.
        fp8_gemm_fprop: precision of the sums of the forward pass.
        fp8_gemm_dgrad: precision of the sums of the gradient of x.
        fp8_gemm_wgrad: precision of the sums of the gradient of w.
        fp8_dpa: must be false; attention runs in the dtype of the model.
        fp8_mha: must be false, for the same reason.
        backward_override: must be None; gradients multiply FP8 operands, too.

    Raises:
        ConfigurationError: if the format, a `QParams` or an `MMParams` is invalid.
        UnknownNameError: if a flag is not a bool.
        UnsupportedOverlapError: if `fp8_dpa` or `fp8_mha` is true, or
            `backward_override` is not None.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self):
        check_flag(
            "Float8CurrentScaling", "use_power_2_scales", self.use_power_2_scales
        )
        _check_format(self)
        for name in _QPARAMS.values():
            _check_type(self, name, QParams, "ub.fp8.QParams(amax_epsilon=...)")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            _check_type(self, name, MMParams, "ub.fp8.MMParams()")
        _check_precision(self)

    def amax_epsilon(self, role: str) -> float:
        """Returns the lower bound of the amax from which a scale is computed.

        Args:
            role: the tensor's role in a GEMM: "input", "kernel" or "output_grad".
        """
        return getattr(self, _QPARAMS[role]).amax_epsilon

    def has_power_2_scale(self, role: str) -> bool:
        """Returns whether the scale of a tensor is rounded to a power of two."""
        own = getattr(self, _QPARAMS[role]).power_2_scale
        return self.use_power_2_scales if own is None else own


_QPARAMS = {
    INPUT: "fp8_quant_fwd_inp",
    KERNEL: "fp8_quant_fwd_weight",
    OUTPUT_GRAD: "fp8_quant_bwd_grad",
}


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(KeywordsChecked):
    """FP8 recipe with a power-of-two scale for each 32 contracted values (MXFP8).

    The scales are float8_e8m0fnu. The exponent of `amax / max` is rounded up, so that
    no value of the block exceeds the largest number of the format.

    Transformer Engine: `transformer_engine.common.recipe.MXFP8BlockScaling`. The array
    format is MXFP8 of the OCP Microscaling specification.

    Attributes:
        margin: exponent that is added to that of every scale.
        fp8_format: formats of forward and backward pass.
        enable_2d_quantization: must be false; blocks of 32 x 32 are not supported.
        fp8_dpa: must be false; attention runs in the dtype of the model.
        fp8_mha: must be false, for the same reason.
        backward_override: must be None; gradients multiply FP8 operands, too.

    Raises:
        ConfigurationError: if the format or the margin is invalid.
        UnknownNameError: if a flag is not a bool.
        UnsupportedOverlapError: if `enable_2d_quantization`, `fp8_dpa` or `fp8_mha` is
            true, or `backward_override` is not None.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self):
        _check_format(self)
        _check_margin(self)
        _check_is_false(
            self, "enable_2d_quantization", "scales of 32 x 32 blocks are not supported"
        )
        _check_precision(self)


@dataclasses.dataclass(frozen=True)
class RowwiseScaling(KeywordsChecked):
    """FP8 recipe with a power-of-two scale per activation row or kernel column.

    The scales are f32. The values that share a scale are contracted: the features of a
    token, or the inputs of an output feature. The largest absolute value of a row
    counts as at least 1e-12, so e4m3 values below 3e-18 become zero.

    Transformer Engine: none. torchao: the float8 recipe "rowwise".

    Attributes:
        fp8_format: formats of forward and backward pass.

    Raises:
        ConfigurationError: if the format is invalid.
    """

    fp8_format: Format = Format.E4M3

    def __post_init__(self):
        _check_format(self)


Recipe = DelayedScaling | Float8CurrentScaling | MXFP8BlockScaling | RowwiseScaling


def check_layer_recipe(op: str, fp8: Any) -> None:
    """Raises an error unless the argument `fp8` of a layer is an FP8 recipe or None."""
    if fp8 is not None:
        check_recipe(op, fp8, "fp8")


def check_recipe(op: str, recipe: Any, name: str = "recipe") -> None:
    """Raises an error unless `recipe`, argument `name` of `op`, is an FP8 recipe."""
    if not isinstance(recipe, Recipe):
        names = ", ".join(f"ub.fp8.{kind.__name__}" for kind in get_args(Recipe))
        raise ConfigurationError(
            f"{op}: {name} = {shown(recipe)} is not a recipe. Pass an instance of one "
            f"of {names}."
        )


def has_one_scale(recipe: Recipe | None) -> bool:
    """Returns whether a recipe has one scale per tensor. False for no recipe (None)."""
    return isinstance(recipe, DelayedScaling | Float8CurrentScaling)


def _check_format(recipe):
    name, value = type(recipe).__name__, recipe.fp8_format
    allowed = "Format.E4M3 or Format.HYBRID"
    if not isinstance(value, Format):
        raise ConfigurationError(
            f"{name}: fp8_format = {shown(value)} is not a Format. Pass {allowed}."
        )
    if value is Format.E5M2:
        raise ConfigurationError(
            f"{name}: fp8_format = Format.E5M2, but no device multiplies two "
            f"float8_e5m2 operands. Pass {allowed}."
        )


def _check_margin(recipe):
    name, margin = type(recipe).__name__, recipe.margin
    low, high = -126, 127  # 2**margin is then a normal f32 number
    if not is_integer(margin) or not low <= margin <= high:
        raise ConfigurationError(
            f"{name}: margin = {shown(margin)}: the scale overflows, or it is not an "
            f"integer. Pass an integer from {low} to {high}, usually 0."
        )


def _check_type(recipe, field, kind, example):
    value = getattr(recipe, field)
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{type(recipe).__name__}: {field} = {shown(value)} is not of type "
            f"{kind.__name__}. Pass one, for example {example}."
        )


def _check_is_false(recipe, field, reason):
    name, value = type(recipe).__name__, getattr(recipe, field)
    check_flag(name, field, value)
    if value:
        raise UnsupportedOverlapError(
            f"{name}: {field} = {shown(value)}, but {reason}. Leave it False."
        )


def _check_precision(recipe):
    """Raises an error if a recipe requests FP8 attention or a non-FP8 backward pass."""
    name = type(recipe).__name__
    for field in ("fp8_dpa", "fp8_mha"):
        _check_is_false(recipe, field, "attention does not run in FP8")
    override = recipe.backward_override
    if override is not None:
        raise UnsupportedOverlapError(
            f"{name}: backward_override = {shown(override)}, but the backward pass "
            "multiplies the FP8 operands of the forward pass. Leave it None, or do not "
            "pass fp8= to layers that need more precise gradients."
        )


def current_scale(
    amax: jax.Array, recipe: Float8CurrentScaling, role: str
) -> jax.Array:
    """Returns the scale amax / m in f32, where m is the largest FP8 number.

    It is 1 if the amax is 0, infinite or NaN.
    """
    largest = jnp.finfo(recipe.fp8_format.dtype(role)).max.astype(jnp.float32)
    amax = jnp.maximum(amax, recipe.amax_epsilon(role))
    inverse = jnp.minimum(largest / amax, _LARGEST_INVERSE)
    if recipe.has_power_2_scale(role):
        inverse = _rounded_down_to_power_of_two(inverse)
    return jnp.where((amax > 0) & jnp.isfinite(amax), 1 / inverse, 1.0)


def _rounded_down_to_power_of_two(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mask = -1 << _SIGNIFICAND_BITS
    return lax.bitcast_convert_type(bits & mask, jnp.float32)


def updated_scale(
    history: jax.Array, scale: jax.Array, recipe: DelayedScaling, role: str
) -> jax.Array:
    """Returns a tensor's scale for this step, computed from earlier steps' amaxes.

    Args:
        history: f32 `[amax_history_len]`; index 0 is the latest step.
        scale: f32 `[1]`, the scale of the previous step.
        recipe: the recipe.
        role: "input", "kernel" or "output_grad".
    """
    largest = jnp.finfo(recipe.fp8_format.dtype(role)).max.astype(jnp.float32)
    algo = recipe.amax_compute_algo
    if callable(algo):
        amax = _one_number("amax_compute_algo", algo(history))
    else:
        # NaNs become infinity, because XLA:CPU's maximum drops NaNs in arrays of at
        # least 4096 elements.
        known = jnp.where(jnp.isnan(history), jnp.inf, history)
        amax = known[0] if algo == "most_recent" else jnp.max(known)
    amax = amax.reshape(scale.shape)
    old = 1 / scale
    if recipe.scaling_factor_compute_algo is None:
        inverse = largest / amax / jnp.float32(2.0**recipe.margin)
    else:
        inverse = recipe.scaling_factor_compute_algo(amax, old, largest, recipe)
        inverse = _one_number("scaling_factor_compute_algo", inverse)
        inverse = inverse.reshape(scale.shape)
    inverse = jnp.clip(inverse, 1 / _LARGEST_INVERSE, _LARGEST_INVERSE)
    return jnp.where((amax > 0) & jnp.isfinite(amax), 1 / inverse, scale)


def _one_number(name, returned):
    """Converts what a user-defined function of a recipe returns to an f32 number."""
    try:
        array = jnp.asarray(returned, jnp.float32)
    except (TypeError, ValueError):
        array = None
    if array is None or array.size != 1:
        found = shown(returned) if array is None else f"an array of shape {array.shape}"
        raise ConfigurationError(
            f"DelayedScaling: {name} returned {found} instead of one number. Return an "
            "f32 scalar."
        )
    return array


def updated_history(history: jax.Array, amax: jax.Array, axis: int = 0) -> jax.Array:
    """Returns the amax history with this step's amax in place of the oldest one.

    The amax is at index 0 of `axis`, and the others are shifted as in Flax. `amax` has
    the shape of `history`, but size 1 along `axis`.
    """
    shifted = jnp.roll(history, -1, axis)
    return lax.dynamic_update_slice_in_dim(shifted, amax.astype(history.dtype), 0, axis)
