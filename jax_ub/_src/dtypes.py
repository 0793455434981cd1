"""The table of element types that the engine knows.

`csrc/gemm/dtype.h` has the same table; a test compares the two.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type of arrays that the engine reads or writes, such as bf16.

    Attributes:
        short_name: the engine's name, such as "bf16", which command lines use, too.
        dtype: the NumPy dtype.
        is_operand: whether operands may have this type; otherwise only scales may.
        is_result: whether results may have this type.
    """

    short_name: str
    dtype: np.dtype
    is_operand: bool = True
    is_result: bool = False


TABLE = (
    DType("f32", jnp.dtype("float32"), is_result=True),
    DType("bf16", jnp.dtype("bfloat16"), is_result=True),
    DType("f16", jnp.dtype("float16"), is_result=True),
    DType("e4m3", jnp.dtype("float8_e4m3fn")),
    DType("e5m2", jnp.dtype("float8_e5m2")),
    DType("e8m0", jnp.dtype("float8_e8m0fnu"), is_operand=False),
)
RESULTS = tuple(row.dtype for row in TABLE if row.is_result)
OPERANDS = RESULTS  # operands without scales
FP8 = tuple(row.dtype for row in TABLE if row.is_operand and not row.is_result)
# Maps short dtype names of the engine to NumPy's names, such as "f32" to "float32".
# `SHORT_NAMES` is the inverse. FP8 dtypes are not included.
BY_SHORT_NAME = {row.short_name: row.dtype.name for row in TABLE if row.is_result}
SHORT_NAMES = {name: short for short, name in BY_SHORT_NAME.items()}


def listed(dtypes: tuple[np.dtype, ...]) -> str:
    """Returns a list of dtypes as text, such as "float32, bfloat16 or float16"."""
    *names, last = (dtype.name for dtype in dtypes)
    return f"{', '.join(names)} or {last}" if names else last
