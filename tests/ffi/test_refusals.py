"""Errors of the handlers if they are called without jax_ub's checks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ub._src.runtime import cpu_engine

ATTRIBUTES = {
    "method": np.int64(0),
    "num_ranks": np.int64(1),
    "ranks": np.zeros(0, np.int64),
    "num_splits": np.int64(0),
    "label": "matmul (test)",
    "channel": "",
    "num_pairs": np.int64(1),
    "rhs_transposed": np.int64(0),
    "has_bias": np.int64(0),
    "has_residual": np.int64(0),
    "scale": np.float32(1),
}


def matmul(x, w, result=None, **changes):
    cpu_engine.register_targets()
    attributes = {k: v for k, v in (ATTRIBUTES | changes).items() if v is not None}
    result = result or jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    call = jax.ffi.ffi_call("jax_ub$matmul", result)
    return jax.block_until_ready(jax.jit(lambda a, b: call(a, b, **attributes))(x, w))


def test_right_attributes_are_taken():
    assert (matmul(jnp.ones((2, 3)), jnp.ones((3, 4))) == 3).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": np.int64(5)}, "matmul: attribute method is 5, expected 0 to 4"),
        ({"num_ranks": np.int64(0)}, "attribute num_ranks is 0, expected 1 to 65536"),
        ({"num_ranks": np.int64(2)}, "a local op has num_ranks = 2"),
        ({"has_bias": np.int64(2)}, "attribute has_bias is 2, expected 0 to 1"),
        ({"num_splits": np.int64(-1)}, "attribute num_splits is -1, expected 0 to"),
        ({"has_row_scales": np.int64(1)}, "has_row_scales without has_scales"),
        ({"num_pairs": None}, "attribute num_pairs"),
        ({"num_pairs": np.float32(1)}, "attribute num_pairs"),
        ({"scale": np.int64(1)}, "attribute scale"),
    ],
)
def test_wrong_attributes_are_refused_when_the_program_is_compiled(changes, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
        matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), **changes)


def test_a_dtype_that_no_op_has_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="none of f32, bf16, f16"):
        matmul(jnp.ones((2, 3), jnp.int32), jnp.ones((3, 4), jnp.int32))


def test_a_result_of_another_size_is_refused_before_it_is_written():
    result = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    text = re.escape("y is f32[2, 5], expected f32[2, 4]")
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), result)


CAST = {"groups": 1, "rows": 1, "columns": 6, "per_column": 0}


def cast(x, scales, dtype=jnp.float8_e4m3fn, **changes):
    cpu_engine.register_targets()
    attributes = {k: np.int64(v) for k, v in (CAST | changes).items() if v is not None}
    call = jax.ffi.ffi_call("jax_ub.cast", jax.ShapeDtypeStruct(x.shape, dtype))
    return jax.block_until_ready(
        jax.jit(lambda a, b: call(a, b, **attributes))(x, scales)
    )


def test_a_cast_with_right_attributes_runs():
    found = cast(jnp.full((2, 3), 6.0), jnp.full((1, 1), 2.0))
    np.testing.assert_array_equal(found.astype("float32"), jnp.full((2, 3), 3.0))


@pytest.mark.parametrize(
    ("operands", "changes", "text"),
    [
        ({}, {"groups": 2}, "the scales do not match the elements"),
        ({}, {"per_column": 1}, "the scales do not match the elements"),
        ({"scales": jnp.ones((2, 1))}, {}, "the scales do not match the elements"),
        ({}, {"rows": None}, "an attribute of the scales is missing"),
        ({"x": jnp.ones((2, 3), jnp.int32)}, {}, "none of f32, bf16, f16"),
        ({"x": jnp.ones((2, 3), jnp.float8_e5m2)}, {}, "none of f32, bf16 and f16"),
        ({"scales": jnp.ones((1, 1), "bfloat16")}, {}, "neither f32 nor e8m0"),
        ({"dtype": jnp.float32}, {}, "the result is not FP8"),
    ],
)
def test_wrong_casts_are_refused(operands, changes, text):
    operands = {"x": jnp.ones((2, 3)), "scales": jnp.ones((1, 1))} | operands
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
        cast(**operands, **changes)
