"""The table of dtypes."""

import numpy as np

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
