"""f64 operands, which no engine multiplies: plain `jax.lax`, summed in f64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from operands import normal
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub.errors import ShapeContractError

COLUMN = (P("tp"), P(None, "tp"), P("tp")), P(None, "tp")
ROW = (P(None, "tp"), P("tp", None), P()), P("tp")
SUM = ROW[0], P()
WHOLE = (P(), P(None, "tp"), P("tp")), P(None, "tp")
LOCAL = (P(), P(), P()), P()


def layer(parallel, sequence_parallel=True):
    def call(x, w, b, *, axis_name, **options):
        return ub.linear(
            x,
            w,
            b,
            parallel=parallel,
            axis_name=parallel and axis_name,
            sequence_parallel=sequence_parallel,
            **options,
        )

    return call


def with_bias(function):
    return lambda x, w, b, **options: function(x, w, bias=b, **options)


CALLS = {
    "all_gather_matmul": (with_bias(ub.all_gather_matmul), *COLUMN),
    "matmul_reduce_scatter": (with_bias(ub.matmul_reduce_scatter), *ROW),
    "matmul_all_reduce": (with_bias(ub.matmul_all_reduce), *SUM),
    "linear": (layer(None), *LOCAL),
    "linear, column": (layer("column"), *COLUMN),
    "linear, column, whole rows": (layer("column", False), *WHOLE),
    "linear, row": (layer("row"), *ROW),
    "linear, row, whole rows": (layer("row", False), *SUM),
}


@pytest.fixture(autouse=True)
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def operands():
    return [normal(i, s, "float64") for i, s in enumerate([(4, 6), (6, 8), (8,)])]


def on_tp(name, num_ranks=2, **options):
    call, in_specs, out_specs = CALLS[name]
    call = functools.partial(call, axis_name="tp", **options)
    return on_ranks(call, tp_mesh(num_ranks), in_specs, out_specs)


@covering(name=CALLS, num_ranks=[1, 2])
def test_f64_falls_back_to_f64_with_gradients_and_a_reason(name, num_ranks):
    ub.fallbacks(clear=True)
    x, w, b = operands()
    function = on_tp(name, num_ranks)
    y = function(x, w, b)
    assert y.dtype == "float64"
    expected = np.asarray(x) @ np.asarray(w) + np.asarray(b)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13)
    (found,) = ub.fallbacks(clear=True)
    assert found.label.startswith(name.split(",")[0])
    assert found.reason == "x is float64"
    check_grads(function, (x, w, b), order=1, modes=["rev"], atol=1e-9, rtol=1e-9)


def test_the_gradient_of_gathered_f64_is_summed_in_f64():
    def both(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)

    out_specs = P(None, "tp"), P("tp")  # every rank's copy of the gathered x
    function = on_ranks(both, tp_mesh(2), (P("tp"), P(None, "tp")), out_specs)
    check_grads(function, operands()[:2], order=1, modes=["rev"], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("configured", [False, True])
def test_a_name_falls_back_unless_a_pass_is_configured(configured):
    options = {"ub_cfgs": {"qkv_dgrad": {"method": "ring_exchange"}}}
    ub.initialize_ub((64, 8), 2, mesh=tp_mesh(2), **(options if configured else {}))
    x, w, b = operands()
    function = on_tp("all_gather_matmul", ub_name="qkv")
    if configured:
        with pytest.raises(ShapeContractError, match="x is float64, but the op takes"):
            function(x, w, b)
    else:
        assert function(x, w, b).dtype == "float64"
        assert ub.fallbacks()[-1].reason == "x is float64"


@pytest.mark.parametrize("name", CALLS)
def test_xla_multiplies_f64_and_records_nothing(name):
    ub.fallbacks(clear=True)
    x, w, b = operands()
    y = on_tp(name, method="xla")(x, w, b)
    np.testing.assert_allclose(y, np.asarray(x) @ w + b, rtol=0, atol=1e-13)
    assert not ub.fallbacks()


@pytest.mark.parametrize("name", CALLS)
def test_a_named_method_rejects_f64(name):
    with pytest.raises(ShapeContractError, match="x is float64, but the op takes"):
        on_tp(name, method="direct")(*operands())


def test_a_numpy_f64_array_is_rejected_without_x64_unless_converted():
    jax.config.update("jax_enable_x64", False)
    x, w = np.zeros((4, 6)), np.zeros((6, 8))
    for method in ("auto", "xla"):
        with pytest.raises(ShapeContractError, match=r"example jnp\.asarray\(x\)\."):
            ub.linear(x, w, method=method)
        with pytest.raises(ShapeContractError, match=r"example jnp\.asarray\(w\)\."):
            ub.linear(jnp.asarray(x), w, method=method)
        assert ub.linear(jnp.asarray(x), jnp.asarray(w), method=method).shape == (4, 8)


@pytest.mark.parametrize("wrong", ["b", "out_dtype"])
def test_f32_operands_take_nothing_in_f64(wrong):
    x, w, b = (a.astype("float32") for a in operands())
    options = {"out_dtype": "float64"} if wrong == "out_dtype" else {}
    b = b.astype("float64") if wrong == "b" else b
    function = on_tp("matmul_all_reduce", method="xla", **options)
    with pytest.raises(ShapeContractError, match=r"bias is|out_dtype = float64"):
        function(x, w, b)
