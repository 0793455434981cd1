"""The table of dtypes, compared with the engine's."""

import numpy as np

from jax_ub import _cpu
from jax_ub._src import dtypes


def test_names_and_sizes_are_those_of_numpy():
    assert dtypes.BY_SHORT_NAME == {
        "f32": "float32",
        "bf16": "bfloat16",
        "f16": "float16",
    }
    for row in dtypes.TABLE:
        bits = int(row.short_name.lstrip("bf"))
        assert np.dtype(row.dtype).itemsize * 8 == bits


def test_lists_of_names_are_text_for_errors():
    assert dtypes.listed(dtypes.OPERANDS) == "float32, bfloat16 or float16"
    assert dtypes.listed(dtypes.OPERANDS[:1]) == "float32"


def test_the_engine_has_the_same_table():
    assert _cpu.dtypes() == {
        row.short_name: {"numpy": row.dtype.name, "size_bytes": row.dtype.itemsize}
        for row in dtypes.TABLE
    }
