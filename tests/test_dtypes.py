"""The table of dtypes, compared with the engine's."""

import jax.numpy as jnp

from jax_ub import _cpu
from jax_ub._src import dtypes


def test_names_and_sizes_are_those_of_numpy():
    assert dtypes.BY_SHORT_NAME == {
        "f32": "float32",
        "bf16": "bfloat16",
        "f16": "float16",
    }
    for name, dtype in dtypes.BY_SHORT_NAME.items():
        bits = int(name.lstrip("bf"))
        assert jnp.dtype(dtype).itemsize * 8 == bits


def test_lists_of_names_are_text_for_errors():
    assert dtypes.listed(dtypes.OPERANDS) == "float32, bfloat16 or float16"
    assert dtypes.listed(dtypes.OPERANDS[:1]) == "float32"


def test_fp8_operands_have_scales_and_are_no_results():
    assert [dtype.name for dtype in dtypes.FP8] == ["float8_e4m3fn", "float8_e5m2"]
    assert not set(dtypes.FP8) & set(dtypes.RESULTS)


def test_the_engine_has_the_same_table():
    assert _cpu.dtypes() == {
        row.short_name: {
            "numpy": row.dtype.name,
            "size_bytes": row.dtype.itemsize,
            "is_operand": row.is_operand,
            "is_result": row.is_result,
        }
        for row in dtypes.TABLE
    }
