"""FP8 operands that are rejected, with the reason, and fallbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh
from refusals import refuses
from scaled_operands import COLUMNS, RECIPES, ROWS, operands, quantized

import jax_ub as ub
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError

GEMMS = (ub.all_gather_matmul, ub.matmul_reduce_scatter, ub.matmul_all_reduce)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def scaled(shape, scales=(), dtype=E4M3, source=None, scale_dtype="float32"):
    values = np.ones(shape, dtype)
    return ub.ScaledArray(values, np.ones(scales, scale_dtype), source)


X, W = scaled((8, 64)), scaled((64, 8))
WIDE = np.ones((64, 8), "bfloat16")
BLOCKS = {"scale_dtype": "float8_e8m0fnu"}
WRONG = {
    "one wide": ("x is FP8, w is bfloat16. Quantize both or neither", X, WIDE),
    "other wide": ("w is FP8, x is bfloat16. Quantize both", WIDE.T, W),
    "no array": ("w is FP8, x is list. Quantize both or neither", [1.0], W),
    "without scales": (
        r"x is float8_e4m3fn without scales. Pass ub.quantize\(x, recipe\), or ub.Sca",
        X.values,
        W.values,
    ),
    "gradients": (
        "x and w are both float8_e5m2, which no device multiplies. Make one of them",
        scaled((8, 64), dtype=E5M2),
        scaled((64, 8), dtype=E5M2),
    ),
    "rows of a kernel": (
        r"w has scales of shape \(64, 1\) for values \(64, 8\), but one per row or "
        r"column has shape \(1, 8\), since axis 0 is contracted. Quantize w with its",
        X,
        scaled((64, 8), (64, 1)),
    ),
    "columns of x": (
        r"x has scales of shape \(1, 64\) for values \(8, 64\), but one per row or",
        scaled((8, 64), (1, 64)),
        W,
    ),
    "blocks of a kernel": (
        r"w has scales of shape \(64, 1\) for values \(64, 32\), but one per block of "
        r"32 has shape \(2, 32\)",
        X,
        scaled((64, 32), (64, 1), **BLOCKS),
    ),
    "contraction": (
        r"x \(8, 32\) has K = 32, but w \(64, 8\) has K = 64",
        scaled((8, 32)),
        W,
    ),
    "dtype of the result": (
        "out_dtype = float8_e4m3fn is not a result the op has",
        X,
        W,
        {"out_dtype": E4M3},
    ),
    "dimensions": (
        r"w has shape \(2, 64, 8\), but a kernel is \[in, out\]",
        X,
        scaled((2, 64, 8)),
    ),
    "rank": (r"x has shape \(64,\), but the op takes", scaled((64,)), W),
    "scales that are no array": (
        "w.scales is of type NoneType, but the op takes an array",
        X,
        jax.tree.map(lambda array: array if array.ndim else None, W),
    ),
    "a recipe for an FP8 x": (
        "x is FP8 already, but fp8 = Float8CurrentScaling quantizes it. Leave out fp8",
        X,
        WIDE,
        {"fp8": RECIPES["current"]},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("op", GEMMS)
def test_wrong_operands(op, wrong):
    text, x, w, *options = WRONG[wrong]
    options = options[0] if options else {}
    refuses(
        ShapeContractError,
        f"{op.__name__}: {text}",
        lambda w: op(x, w, axis_name="tp", **options),
        w,
    )


@pytest.mark.parametrize(
    ("w", "text"),
    [
        (
            scaled((64, 8), dtype=E5M2),
            "w is float8_e5m2, but kernels of Float8CurrentScaling are float8_e4m3fn",
        ),
        (scaled((64, 8), (64, 1)), r"w has scales of shape \(64, 1\) for values"),
        (scaled((2, 64, 8)), "w has shape .* but a kernel is"),
        ((W, WIDE), r"w\[0\] is FP8, w\[1\] is bfloat16. Quantize both or neither"),
    ],
)
def test_fp8_kernels_that_do_not_fit_a_recipe(w, text):
    def call(x, w):
        options = {"axis_name": "tp", "fp8": RECIPES["current"]}
        return ub.all_gather_matmul(x, w, **options)

    refuses(ShapeContractError, text, call, WIDE.T, w)


def test_one_wide_kernel_of_several():
    def call(x, w):
        return ub.all_gather_matmul(x, (w, WIDE), axis_name="tp")

    text = r"x is FP8, w\[1\] is bfloat16. Quantize both or neither"
    refuses(ShapeContractError, text, call, X, W)


@pytest.mark.parametrize("fp8", [None, RECIPES["row"]])
def test_only_some_of_several_kernels_with_scales_of_blocks(fp8):
    def call(x, w):
        return ub.all_gather_matmul(x, (W, w), axis_name="tp", fp8=fp8)

    text = (
        r"w\[0\] has float32 scales, but w\[1\] has float8_e8m0fnu scales. Quantize "
        "all kernels of a call by the same recipe"
    )
    refuses(ShapeContractError, text, call, WIDE.T if fp8 else X, BLOCK)


ONE, BLOCK = scaled((8, 64)), scaled((64, 8), (2, 8), **BLOCKS)
WRONG_LOCAL = {
    "one wide": (ShapeContractError, "dy is FP8, w is bfloat16. Quantize", ONE, WIDE),
    "without scales": (
        ShapeContractError,
        r"dy is float8_e4m3fn without scales. Pass ub.quantize\(dy, recipe\)",
        ONE.values,
        W,
    ),
    "gradients": (
        ShapeContractError,
        "dy and w are both float8_e5m2, which no device multiplies. Make one of them",
        scaled((8, 8), dtype=E5M2),
        scaled((64, 8), dtype=E5M2),
    ),
    "columns of dy": (
        ShapeContractError,
        r"dy has scales of shape \(1, 8\) for values \(8, 8\), but one per row or",
        scaled((8, 8), (1, 8)),
        BLOCK,
    ),
    "blocks of a kernel": (
        ShapeContractError,
        r"w has scales of shape \(64, 1\) for values \(64, 32\), but one per block of",
        scaled((8, 32)),
        scaled((64, 32), (64, 1), **BLOCKS),
    ),
    "dimensions": (
        ShapeContractError,
        r"w has shape \(8,\), but a kernel is \[in, out\]",
        scaled((8, 8)),
        scaled((8,)),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_LOCAL)
def test_wrong_operands_of_dgrad_add(wrong):
    error, text, dy, w = WRONG_LOCAL[wrong]
    with pytest.raises(error, match=f"dgrad_add: {text}"):
        ub.dgrad_add(dy, w, jnp.zeros((8, 64)))


def test_wrong_operands_of_wgrad_accumulate():
    columns, x = scaled((64, 8), (1, 8)), scaled((64, 4))
    for dy, text in (
        (WIDE, "x is FP8, dy is bfloat16. Quantize both or neither"),
        (columns, r"dy has scales of shape \(1, 8\) for values \(64, 8\), but one"),
    ):
        with pytest.raises(ShapeContractError, match=f"wgrad_accumulate: {text}"):
            ub.wgrad_accumulate(x, dy, jnp.zeros((4, 8)))


@pytest.mark.parametrize("op", GEMMS)
def test_a_scale_per_tensor_must_not_differ_over_the_ranks_that_share_it(op):
    def call(x, w, *, agreed):
        x, w = quantized(RECIPES["current"], x, w, axis_name="tp" if agreed else None)
        return op(x, w, axis_name="tp")

    x, w, _ = operands()
    gathers = op is ub.all_gather_matmul
    specs = (ROWS, COLUMNS) if gathers else (COLUMNS, ROWS)
    out = {ub.all_gather_matmul: COLUMNS, ub.matmul_reduce_scatter: ROWS}.get(op, P())
    text = r"x has one scale per tensor, which differs over \('tp',\). Pass axis_name"
    for agreed in (True, False):
        function = on_ranks(
            lambda x, w, agreed=agreed: call(x, w, agreed=agreed),
            tp_mesh(2),
            specs,
            out,
        )
        if agreed:
            function.trace(x, w)
        else:
            with pytest.raises(ShapeContractError, match=text):
                function.trace(x, w)


def test_a_kernel_that_is_contracted_over_ranks_needs_one_scale():
    def call(x, w):
        x = ub.quantize(x, axis_name="tp")
        return ub.matmul_all_reduce(x, ub.quantize(w, role="kernel"), axis_name="tp")

    function = on_ranks(call, tp_mesh(2), (COLUMNS, ROWS), P())
    with pytest.raises(ShapeContractError, match="w has one scale per tensor, which"):
        function.trace(*operands()[:2])


def test_differentiating_operands_without_a_source():
    def loss(x, w):
        x, w = (ub.ScaledArray(a.astype(E4M3), jnp.float32(1)) for a in (x, w))
        return jnp.sum(ub.linear(x, w).astype("float32"))

    for number, name in enumerate("xw"):
        text = f"linear: {name} is FP8 and has no source to receive a gradient. Make it"
        with pytest.raises(UnsupportedOverlapError, match=text):
            jax.grad(loss, number)(jnp.ones((8, 64)), jnp.ones((64, 8)))

    # The gradient of the bias needs no source.
    gradient = jax.grad(lambda b: jnp.sum(ub.linear(X, W, b)))(jnp.ones(8))
    np.testing.assert_array_equal(gradient, 8.0)


def test_a_gathered_array_has_no_source():
    def loss(x, w, frozen):
        x, w = quantized(RECIPES["current"], x, w)
        y, gathered = ub.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)
        gathered = jax.lax.stop_gradient(gathered) if frozen else gathered
        z = ub.linear(gathered, w)
        return jax.lax.psum(jnp.sum((y + z).astype("float32")), "tp")

    x, w, _ = operands()
    for frozen in (True, False):
        function = on_ranks(
            lambda x, w, frozen=frozen: loss(x, w, frozen),
            tp_mesh(2),
            (ROWS, COLUMNS),
            P(),
        )
        if frozen:
            jax.grad(function)(x, w)
        else:
            with pytest.raises(UnsupportedOverlapError, match="has no source"):
                jax.grad(function)(x, w)


def test_ranks_that_are_an_axis_of_vmap():
    def call(x, w):
        return ub.matmul_all_reduce(x, w, axis_name="ranks", method="xla")

    text = r"FP8 operands over \('ranks',\), an axis of jax.vmap. Use jax.shard_map"
    x = scaled((2, 8, 64))
    with pytest.raises(UnsupportedOverlapError, match=text):
        jax.vmap(lambda v: call(ub.ScaledArray(v, X.scales), W), axis_name="ranks")(
            x.values
        )
