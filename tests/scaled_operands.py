"""FP8 operands of linear layers with exact products, and the layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from covering import nightly
from flax.linen.fp8_ops import fp32_max_grad
from jax.sharding import PartitionSpec as P
from operands import assert_equal
from programs import on_ranks, tp_mesh

import jax_ub as ub

FP8 = ub.fp8
DELAYED = FP8.DelayedScaling(amax_history_len=2)
# A recipe for each way to compute scales, with the default options.
DEFAULT_RECIPES = {
    "current": FP8.Float8CurrentScaling(),
    "delayed": DELAYED,
    "block": FP8.MXFP8BlockScaling(),
    "row": FP8.RowwiseScaling(),
}
# For tests of layers that pass recipes on: one with a state, one with several scales.
PASSED_ON = ["delayed", "block", *nightly("current", "row")]
# Recipes whose scales are powers of two for the operands below.
RECIPES = {
    **DEFAULT_RECIPES,
    "current": FP8.Float8CurrentScaling(use_power_2_scales=True),
}
ROWS, COLUMNS = P("tp"), P(None, "tp")
# The shardings of x, w, b and the result in each mode of `ub.linear`.
SPECS = {
    ("column", True): ((ROWS, COLUMNS, P("tp")), COLUMNS),
    ("column", False): ((P(), COLUMNS, P("tp")), COLUMNS),
    ("row", True): ((COLUMNS, ROWS, P()), ROWS),
    ("row", False): ((COLUMNS, ROWS, P()), P()),
    (None, True): ((P(), P(), P()), P()),
}
MODES = list(SPECS)
COLUMN, ROW, SUM, LOCAL = MODES[0], MODES[2], MODES[3], MODES[4]
METHODS = ["direct", "ring_exchange", "pipeline", "external", "xla"]


def integers(seed, shape, dtype="bfloat16"):
    """Returns integers times a power of two for each row.

    They are exact in e4m3 with the scales of all `RECIPES`, and so are sums of
    products. They are NumPy's, for the reason that `operands.py` gives.
    """
    random = np.random.default_rng(seed)
    factors = 2.0 ** random.integers(0, 4, (shape[0], *(1,) * (len(shape) - 1)))
    return (random.integers(-8, 9, shape) * factors).astype(jnp.dtype(dtype))


def operands(dtype="bfloat16", num_features=8):
    """Returns x [8, 128], w [128, num_features] and b [num_features]."""
    return (
        integers(0, (8, 128), dtype),
        integers(1, (128, num_features), dtype),
        integers(2, (num_features,), dtype),
    )


def quantized(recipe, x, *ws, rhs_transposed=False, axis_name="tp"):
    """Quantizes x and kernels by a recipe, with agreed scales per tensor."""
    state = FP8.init_state(recipe) or None
    role = "input" if rhs_transposed else "kernel"
    quantize = functools.partial(
        ub.quantize, recipe=recipe, state=state, axis_name=axis_name
    )
    return quantize(x), *(quantize(w, role=role) for w in ws)


def linear(mode, recipe, **options):
    """Returns a function (x, w, b) that quantizes x and w and calls `ub.linear`."""
    parallel, sequence_parallel = mode

    def call(x, w, b):
        axis_name = "tp" if parallel else None
        x, w = quantized(
            recipe,
            x,
            w,
            rhs_transposed=options.get("rhs_transposed", False),
            axis_name=axis_name,
        )
        return ub.linear(
            x,
            w,
            b,
            parallel=parallel,
            axis_name=axis_name,
            sequence_parallel=sequence_parallel,
            **options,
        )

    return call


def on_tp(mode, function, num_ranks=4, **options):
    """Compiles a function (x, w, b) for the shardings of a mode."""
    return on_ranks(function, tp_mesh(num_ranks), *SPECS[mode], **options)


def plain(x, w, b):
    """Computes the layer in f32."""
    x, w, b = (jnp.asarray(a, jnp.float32) for a in (x, w, b))
    return jnp.matmul(x, w, precision="highest") + b


def value_and_gradients(function, *operands):
    """Returns a result, and gradients for an integer gradient of the result."""
    gradients, y = _gradients(function, operands)(*operands)
    return y, gradients


def _gradients(function, operands):
    def loss(*operands):
        y = function(*operands)
        return jnp.sum(y.astype(jnp.float32) * integers(9, y.shape, "float32")), y

    numbers = tuple(range(len(operands)))
    return jax.jit(jax.grad(loss, numbers, has_aux=True))


def assert_exact(function, values, wanted=plain):
    """Asserts that results and gradients are f32 sums, rounded once to their dtypes.

    Returns:
        The optimized HLO of the program that computes both.
    """
    wide = (value.astype("float32") for value in values)
    expected = value_and_gradients(wanted, *wide)
    program = _gradients(function, values).lower(*values).compile()
    gradients, y = program(*values)
    assert [g.dtype for g in gradients] == [value.dtype for value in values]
    found = y, gradients
    rounded = jax.tree.map(lambda f, e: np.asarray(e).astype(f.dtype), found, expected)
    jax.tree.map(assert_equal, found, rounded)
    return program.as_text()


def check_main_grad(layer):
    """Asserts that a row-parallel layer (x, w, main_grad) accumulates in main_grad."""
    x, w, _ = operands()
    main_grad = integers(5, w.shape, "float32")
    function = on_ranks(layer, tp_mesh(2), (COLUMNS, ROWS, ROWS), ROWS)
    _, (dx, dw, accumulated) = value_and_gradients(function, x, w, main_grad)
    wide = (v.astype("float32") for v in (x, w))
    _, expected = value_and_gradients(lambda x, w: plain(x, w, 0.0), *wide)
    assert_equal(dx, expected[0].astype("bfloat16"))
    assert_equal(accumulated, main_grad + expected[1])
    assert not np.any(dw)


def with_maximum_as_sum(state):
    """Converts a state to the dtype of which JAX adds gradients by their maximum."""
    return jax.tree.map(
        lambda array: jax.lax.convert_element_type(array, fp32_max_grad), state
    )
