"""Fields, defaults and errors of recipes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jax_ub as ub

FP8 = ub.fp8


def test_defaults_are_those_of_transformer_engine():
    delayed, current = FP8.DelayedScaling(), FP8.Float8CurrentScaling()
    assert dataclasses.asdict(delayed) == {
        "margin": 0,
        "fp8_format": FP8.Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    assert (current.use_power_2_scales, current.fp8_format) == (
        False,
        FP8.Format.HYBRID,
    )
    assert current.fp8_quant_fwd_inp.amax_epsilon == 0.0
    assert not any(map(current.has_power_2_scale, ("input", "kernel", "output_grad")))
    assert current.fp8_gemm_fprop == FP8.MMParams(use_split_accumulator=False)
    assert current.fp8_gemm_dgrad == FP8.MMParams(use_split_accumulator=True)
    assert current.fp8_gemm_wgrad == FP8.MMParams() == current.fp8_gemm_dgrad
    assert FP8.MXFP8BlockScaling() == FP8.MXFP8BlockScaling(
        margin=0,
        fp8_format=FP8.Format.E4M3,
        enable_2d_quantization=False,
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
    )
    assert FP8.RowwiseScaling().fp8_format is FP8.Format.E4M3


@pytest.mark.parametrize(
    ("form", "gradient"), [("E4M3", "e4m3fn"), ("HYBRID", "e5m2"), ("E5M2", "e5m2")]
)
def test_formats_say_the_dtype_of_each_tensor(form, gradient):
    form = FP8.Format[form]
    assert form.dtype("output_grad") == f"float8_{gradient}"
    both = {form.dtype("input"), form.dtype("kernel")}
    assert both == {
        jnp.dtype("float8_e5m2" if form.name == "E5M2" else "float8_e4m3fn")
    }


@pytest.mark.parametrize("kind", ["DelayedScaling", "MXFP8BlockScaling"])
def test_recipes_are_frozen_and_hashable(kind):
    recipe = getattr(FP8, kind)()
    assert {recipe: 1}[getattr(FP8, kind)()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 1


CONFIGURATION, UNKNOWN = ub.errors.ConfigurationError, ub.errors.UnknownNameError
UNSUPPORTED = ub.errors.UnsupportedOverlapError


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (
            "DelayedScaling",
            {"amax_compute_algo": "mean"},
            UNKNOWN,
            "amax_compute_algo = 'mean' is not .* Known: 'max', 'most_recent'. A funct",
        ),
        (
            "DelayedScaling",
            {"margin": -200},
            CONFIGURATION,
            "DelayedScaling: margin = -200: the scale overflows.* from -126 to 127",
        ),
        (
            "MXFP8BlockScaling",
            {"margin": 0.5},
            CONFIGURATION,
            "margin = 0.5: the scale",
        ),
        (
            "DelayedScaling",
            {"amax_history_len": 0},
            CONFIGURATION,
            "amax_history_len = 0 is not a positive integer. Pass the number of steps",
        ),
        (
            "DelayedScaling",
            {"scaling_factor_compute_algo": 2},
            CONFIGURATION,
            "scaling_factor_compute_algo = 2 is not a function. Pass one of",
        ),
        (
            "DelayedScaling",
            {"reduce_amax": 2},
            UNKNOWN,
            "reduce_amax = 2 is not a bool",
        ),
        ("DelayedScaling", {"fp8_dpa": True}, UNSUPPORTED, "fp8_dpa = True, but atten"),
        ("Float8CurrentScaling", {"fp8_mha": True}, UNSUPPORTED, "fp8_mha = True, but"),
        (
            "MXFP8BlockScaling",
            {"fp8_dpa": True},
            UNSUPPORTED,
            "fp8_dpa = True, but att",
        ),
        *(
            (
                kind,
                {"backward_override": "dequantized"},
                UNSUPPORTED,
                f"{kind}: backward_override = 'dequantized', but the backward pass mul",
            )
            for kind in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
        ),
        (
            "Float8CurrentScaling",
            {"use_power_2_scales": "yes"},
            UNKNOWN,
            "use_power_2_scales = 'yes' is not a bool",
        ),
        (
            "Float8CurrentScaling",
            {"fp8_quant_fwd_inp": 1.0},
            CONFIGURATION,
            "fp8_quant_fwd_inp = 1.0 is not of type QParams. Pass one, for exam",
        ),
        (
            "Float8CurrentScaling",
            {"fp8_gemm_dgrad": True},
            CONFIGURATION,
            r"fp8_gemm_dgrad = True is not of type MMParams. .* ub.fp8.MMParams\(\)",
        ),
        (
            "MMParams",
            {"use_split_accumulator": None},
            UNKNOWN,
            "MMParams: use_split_accumulator = None is not a bool",
        ),
        (
            "QParams",
            {"amax_epsilon": -1},
            CONFIGURATION,
            "amax_epsilon = -1 is not a num",
        ),
        (
            "QParams",
            {"stochastic_rounding": True},
            ub.errors.UnknownArgumentError,
            "QParams: it has no argument 'stochastic_rounding'. Known: 'power_2_scale'",
        ),
        ("QParams", {"power_2_scale": 2}, UNKNOWN, "power_2_scale = 2 is not a bool"),
        (
            "MXFP8BlockScaling",
            {"enable_2d_quantization": True},
            UNSUPPORTED,
            "enable_2d_quantization = True, but scales of 32 x 32 blocks are not",
        ),
        (
            "RowwiseScaling",
            {"fp8_format": "E4M3"},
            CONFIGURATION,
            "fp8_format = 'E4M3' is not a Format. Pass Format.E4M3 or Format.HYBRID",
        ),
        (
            "Float8CurrentScaling",
            {"fp8_format": FP8.Format.E5M2},
            CONFIGURATION,
            "Format.E5M2, but no device multiplies two float8_e5m2 operands",
        ),
    ],
)
def test_errors_name_the_field_its_value_and_a_fix(kind, options, error, text):
    with pytest.raises(error, match=text):
        getattr(FP8, kind)(**options)


def test_errors_of_quantize():
    x = jnp.ones((4, 80))
    shape, blocks = ub.errors.ShapeContractError, FP8.MXFP8BlockScaling()
    state = FP8.init_state(FP8.DelayedScaling())
    cases = [
        (
            CONFIGURATION,
            "recipe = 'mxfp8' is not a recipe. .*ub.fp8.DelayedSc",
            "mxfp8",
            {},
        ),
        (
            UNKNOWN,
            "role = 'weight' is not a role. .*'kernel'",
            None,
            {"role": "weight"},
        ),
        (
            shape,
            "K = 80 is no multiple of 32, which MXFP8 needs. Pad K, or",
            blocks,
            {},
        ),
        (shape, "N = 80 is no multiple of 32", blocks, {"role": "output_grad"}),
        (
            shape,
            "axis_name = 'tp' is not a manual mesh axis",
            None,
            {"axis_name": "tp"},
        ),
        (CONFIGURATION, "MXFP8BlockScaling has no state", blocks, {"state": {"a": x}}),
        (CONFIGURATION, "DelayedScaling needs a state, but", FP8.DelayedScaling(), {}),
        (
            shape,
            r"state\['input_amax_history'\] is float32\(1024,\), but .* float32\(3,\)"
            r"\. .* needs the amax_history_len with which it was made",
            FP8.DelayedScaling(amax_history_len=3),
            {"state": state},
        ),
        (
            shape,
            r"state\['input_scale'\] is bfloat16\(1,\), but .* keep it in float32",
            FP8.DelayedScaling(),
            {"state": jax.tree.map(lambda a: a.astype("bfloat16"), state)},
        ),
    ]
    for error, text, recipe, options in cases:
        with pytest.raises(error, match=text):
            ub.quantize(x, recipe, **options)
    with pytest.raises(shape, match="x is float8_e5m2, but the op takes float32"):
        ub.quantize(x.astype("float8_e5m2"))
    with pytest.raises(shape, match=r"x has shape \(80,\), but the op takes"):
        ub.quantize(x[0], role="kernel")
    with pytest.raises(shape, match="is empty"):
        ub.quantize(x[:0])
    with pytest.raises(
        UNSUPPORTED, match="DelayedScaling needs a state for each kernel"
    ):
        FP8.quantize_params({"w": x}, FP8.DelayedScaling())
