"""`wire_dtype="fp8"` and `fp8_buf`: wide arrays and partial sums that travel as FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from layouts import whole
from operands import assert_equal, normal
from programs import on_ranks, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES
from scaled_operands import SPECS

import jax_ub as ub
from jax_ub.errors import ConfigurationError

COLUMN, ROW = ("column", True), ("row", True)
FP8, NONE = ub.UserBufferQuantizationMode.FP8, ub.UserBufferQuantizationMode.NONE
WIRE = {"wire_dtype": "fp8"}
M, K, N = 16, 64, 32
X, W, DY = normal(0, (M, K)), normal(1, (K, N)), normal(2, (M, N))


@functools.partial(jax.jit, static_argnums=1)
def rounded(x, num_columns=1):
    """Rounds each row to FP8, or each of several parts of the row."""
    parts = jnp.split(x, num_columns, -1)
    rows = ub.fp8.RowwiseScaling()
    return jnp.concatenate(
        [ub.quantize(part, rows).dequantize(jnp.float32) for part in parts], -1
    )


def product(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def summed(x, w, num_ranks, round_sums):
    """Multiplies x by w; each rank has a part of K, whose product is rounded."""
    xs, ws = np.split(x, num_ranks, -1), np.split(w, num_ranks, 0)
    products = (product(x, w).astype(np.float32) for x, w in zip(xs, ws, strict=True))
    return sum(np.asarray(round_sums(y)) for y in products)


def gradients_of(mode, num_ranks, dtype="float32", **options):
    """Returns a function (x, w, dy) -> y, dx, dw of `ub.linear` on ranks."""

    def layer(x, w, b):
        return ub.linear(
            x,
            w,
            parallel=mode[0],
            axis_name="tp",
            ub_name="qkv" if mode == COLUMN else "proj",
            **options,
        )

    function = on_ranks(layer, tp_mesh(num_ranks), *SPECS[mode])

    def step(x, w, dy):
        b = jnp.zeros(N, dtype)
        y, backward = jax.vjp(lambda x, w: function(x, w, b), x, w)
        return y, *backward(dy.astype(y.dtype))

    return jax.jit(step)


def initialize(num_ranks, **ub_cfgs):
    mesh = tp_mesh(num_ranks)
    ub.destroy_ub()  # in several processes, `tp_mesh` has initialized the axis
    ub.initialize_ub(
        [3 * M, max(K, N)],
        num_ranks,
        dtype=jnp.float32,
        ub_cfgs=ub_cfgs,
        mesh=mesh,
    )


def assert_close(found, wanted, rtol=1e-5):
    for x, y in zip(map(whole, found), map(whole, wanted), strict=True):
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y)


METHODS = {"AG": [None, "ring_exchange", "pipeline", "direct", "external", "xla"]}
METHODS["RS"] = [None, "ring_exchange", "pipeline", "xla"]


@covering(method=METHODS["AG"], num_ranks=[2, 4])
def test_a_column_layer_gathers_fp8(method, num_ranks):
    """The forward pass multiplies rounded rows; the dgrad gathers x for the wgrad."""
    initialize(num_ranks, qkv_fprop={**WIRE, "method": method}, qkv_dgrad=WIRE)
    found = gradients_of(COLUMN, num_ranks)(X, W, DY)
    x = rounded(X)
    assert_close(found, (product(x, W), product(DY, W.T), product(x.T, DY)))


@covering(method=METHODS["RS"], num_ranks=[2, 4])
def test_a_column_layer_scatters_fp8(method, num_ranks):
    """A dgrad that is not bulk sends partial sums and x as FP8."""
    initialize(num_ranks, qkv_dgrad={**WIRE, "method": method})
    found = gradients_of(COLUMN, num_ranks)(X, W, DY)
    splits = 4 if method == "pipeline" else 1
    dx = summed(DY, W.T, num_ranks, lambda y: rounded(y, splits))
    assert_close(found, (product(X, W), dx, product(rounded(X).T, DY)))


@covering(method=METHODS["RS"], num_ranks=[2, 4])
def test_a_row_layer_scatters_fp8(method, num_ranks):
    cfg = {**WIRE, "method": method}
    initialize(num_ranks, proj_fprop=cfg)
    found = gradients_of(ROW, num_ranks)(X, W, DY)
    splits = 4 if method == "pipeline" else 1
    y = summed(X, W, num_ranks, lambda y: rounded(y, splits))
    assert_close(found, (y, product(DY, W.T), product(X.T, DY)))
    reason = "its partial sums are sent as FP8, by XLA's all-to-all"
    assert reason in {one.reason for one in ub.fallbacks() if "proj" in one.label}


@pytest.mark.parametrize("method", METHODS["AG"])
def test_a_row_layer_gathers_fp8_gradients(method):
    initialize(2, proj_dgrad={**WIRE, "method": method})
    found = gradients_of(ROW, 2)(X, W, DY)
    dy = rounded(DY)
    assert_close(found, (product(X, W), product(dy, W.T), product(X.T, dy)))


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float16")])
def test_other_dtypes(dtype):
    initialize(2, qkv_fprop=WIRE, qkv_dgrad=WIRE, proj_fprop=WIRE, proj_dgrad=WIRE)
    x, w, dy = (a.astype(dtype) for a in (X, W, DY))
    wide = [a.astype(np.float32) for a in (x, w, dy)]
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    found = gradients_of(COLUMN, 2, dtype)(x, w, dy)
    assert all(a.dtype == dtype for a in found)
    rows = rounded(wide[0])
    wanted = (
        product(rows, wide[1]),
        product(wide[2], wide[1].T),
        product(rows.T, wide[2]),
    )
    assert_close([a.astype("f4") for a in found], wanted, tolerance)
    found = gradients_of(ROW, 2, dtype)(x, w, dy)
    rows = rounded(wide[2])
    y = summed(wide[0], wide[1], 2, lambda y: rounded(y, 4))
    wanted = (y, product(rows, wide[1].T), product(wide[0].T, rows))
    assert_close([a.astype("f4") for a in found], wanted, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_largest_numbers_stay_finite(dtype):
    initialize(2, qkv_fprop={**WIRE, "method": "external"}, qkv_dgrad=WIRE)
    x, w, dy = (np.zeros_like(a, dtype) for a in (X, W, DY))
    largest = jnp.finfo(dtype).max
    x[:, 0], x[:, 1] = largest, -largest
    w[0] = dy[0] = float(16 / largest)  # a normal number
    found = gradients_of(COLUMN, 2, dtype)(x, w, dy)
    y, _, dw = (whole(a).astype(np.float32) for a in found)
    assert_close((y, dw[0]), (np.full((M, N), 16.0), np.full(N, 16.0)), 0.04)


def test_the_largest_partial_sums_stay_finite():
    initialize(2, proj_fprop=WIRE)
    largest = jnp.finfo("float32").max
    x, w, expected = (np.zeros_like(a) for a in (X, W, DY))
    x[:, 0], x[0, 0], w[0] = largest, -largest, 1
    expected[:], expected[0] = largest, -largest
    assert_equal(gradients_of(ROW, 2)(x, w, DY)[0], expected)


@pytest.mark.parametrize("mode", [ROW, *nightly(COLUMN)])
def test_small_numbers_have_the_same_relative_error(mode):
    initialize(2, qkv_fprop=WIRE, qkv_dgrad=WIRE, proj_fprop=WIRE, proj_dgrad=WIRE)
    step, small = gradients_of(mode, 2), 2.0**-80
    x, dy = X.copy(), DY.copy()
    x[3], dy[5] = 0, 0
    y, dx, dw = step(x, W, dy)
    found = step(small * x, W, small * dy)
    assert_equal(found, (small * y, small * dx, 0 * dw))
    assert_equal(step(small * x, W, dy)[2], small * dw)


def test_bias_residual_batches_several_kernels_and_transposed_kernels():
    initialize(2, qkv_fprop={**WIRE, "method": None}, proj_fprop=WIRE)
    x = normal(3, (3, M, K))
    residual = normal(4, (3, M, N))
    mesh, tokens = tp_mesh(2), P(None, "tp")

    def column(x, w):
        return ub.all_gather_matmul(x, (w, 2 * w), axis_name="tp", ub_name="qkv")

    features = P(None, None, "tp")
    both = on_ranks(column, mesh, (tokens, P(None, "tp")), features)
    first = product(rounded(x), W)
    assert_close(both(x, W), (first, 2 * first))

    def row(x, w, b, residual):
        return ub.matmul_reduce_scatter(
            x,
            w,
            axis_name="tp",
            ub_name="proj",
            bias=b,
            residual=residual,
            rhs_transposed=True,
        )

    specs = (features, P(None, "tp"), P(), tokens)
    y = on_ranks(row, mesh, specs, tokens)(x, W.T, DY[0], residual)
    wanted = summed(x, W, 2, lambda y: rounded(y, 4)) + DY[0] + residual
    assert_close((y,), (wanted,))


def test_one_byte_per_element_is_sent():
    initialize(2, qkv_fprop=WIRE, qkv_dgrad=WIRE, proj_fprop=WIRE, proj_dgrad=WIRE)
    for mode in (COLUMN, ROW):
        step = gradients_of(mode, 2)
        text = step.lower(X, W, DY).as_text()
        sent = [line for line in text.splitlines() if "all_to_all" in line]
        assert len(sent) == (4 if mode == ROW else 0)
        assert all("xui8>" in line for line in sent)
        gathers = [line for line in text.splitlines() if "@jax_ub$all_gather" in line]
        bulk = [line for line in text.splitlines() if "@jax_ub$bulk_all_g" in line]
        assert len(gathers) == 1
        assert len(bulk) == (mode == COLUMN)
        for line in (*gathers, *bulk):
            assert "xf8E4M3FN>" in line
    for name in ("qkv_fprop", "qkv_dgrad", "proj_fprop", "proj_dgrad"):
        found = ub.get_ub(name)
        assert found.buffer_dtype == jnp.uint8
        assert found.size_bytes == np.prod(found.buffer_shape)
    assert ub.get_ub("qkv_wgrad").buffer_dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:.*but not of the FP8 state")
@pytest.mark.parametrize("recipe", ["delayed", *nightly("current", "block", "row")])
def test_fp8_buf_sends_partial_sums_as_fp8(recipe):
    recipe = RECIPES[recipe]
    results, mesh = [], tp_mesh(2)
    for fp8_buf in (False, True):
        ub.destroy_ub()
        ub.initialize_ub(
            [M, K],
            2,
            use_fp8=True,
            ub_cfgs={"proj_fprop": {"fp8_buf": fp8_buf}},
            mesh=mesh,
        )
        found = ub.get_ub("proj_fprop", use_fp8=True)
        assert found.buffer_dtype == (jnp.uint8 if fp8_buf else jnp.bfloat16)
        options = {"fp8": recipe, "fp8_state": ub.fp8.init_state(recipe) or None}
        step = gradients_of(ROW, 2, **options)
        text = step.lower(X, W, DY).as_text()
        assert text.count("all_to_all") == (4 if fp8_buf else 0)
        results.append(jax.block_until_ready(step(X, W, DY)))
    (y, *others), (rounded_y, *same) = results
    assert_equal(same, others)
    assert 0.01 < jnp.linalg.norm(rounded_y - y) / jnp.linalg.norm(y) < 0.032


def test_errors_of_the_documentation():
    """A gathered operand has an error of 2.7 % of its RMS, a sum of 2.7 %, too."""
    x, w = normal(5, (256, 512)), normal(6, (512, 64))
    exact = product(x, w)
    gathered = product(rounded(x), w)
    scattered = summed(x, w, 4, rounded)
    for found in (gathered, scattered):
        error = jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)
        assert 0.02 < error < 0.032


def test_one_rank_sends_nothing():
    initialize(1, qkv_fprop=WIRE, proj_fprop=WIRE)
    for mode in (COLUMN, ROW):
        assert_close(gradients_of(mode, 1)(X, W, DY)[:1], (product(X, W),), 1e-6)


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        (
            "qkv_fprop",
            {"wire_dtype": "int8"},
            "'int8' is not \"fp8\" or None",
        ),
        ("proj_fprop", {**WIRE, "method": "direct"}, '"direct" sends no partial sums.'),
        (
            "proj_fprop",
            {**WIRE, "method": "external"},
            "sends no partial sums. Use",
        ),
        ("qkv_wgrad", WIRE, "'fp8', but bulk sums the result of a GEMM"),
    ],
)
def test_wrong_settings(name, entry, text):
    with pytest.raises(ConfigurationError) as raised:
        initialize(2, **{name: entry})
    assert text in str(raised.value)
