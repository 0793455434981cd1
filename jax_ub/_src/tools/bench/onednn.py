"""Calls oneDNN's GEMM for comparison, if it is installed (Debian: libdnnl2)."""

import ctypes
import ctypes.util
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

_FUNCTIONS = {"float32": "dnnl_sgemm", "bfloat16": "dnnl_gemm_bf16bf16f32"}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """oneDNN's GEMM `y = a b + beta y` of row-major numpy matrices, with f32 `y`.

    This call cannot round its result to bf16. The bf16 product stays in f32, which
    favors oneDNN in the comparison.
    """

    function: Any
    layout: str

    def __call__(self, a: np.ndarray, b: np.ndarray, y: np.ndarray, beta: float) -> int:
        """Writes `a b + beta y` into `y`; returns oneDNN's status, 0 for success."""
        transposed = ("T" if self.layout == "tn" else "N", "NT"[self.layout == "nt"])
        contracting = a.shape[0 if self.layout == "tn" else 1]
        return self.function(
            *(ctypes.c_char(letter.encode()) for letter in transposed),
            *(ctypes.c_int64(size) for size in (*y.shape, contracting)),
            ctypes.c_float(1),
            *_pointer(a),
            *_pointer(b),
            ctypes.c_float(beta),
            *_pointer(y),
        )


def find(dtype: str, layout: str) -> Gemm | str:
    """Returns oneDNN's GEMM for a dtype and layout, or a text that says why not.

    The GEMM is tried once, because oneDNN may not support the dtype on this processor.
    """
    library = _library()
    if library is None:
        return "oneDNN is not installed (Debian: apt install libdnnl2)"
    function = getattr(library, _FUNCTIONS.get(dtype, ""), None)
    if function is None:
        return f"this oneDNN has no GEMM for {dtype}"
    gemm = Gemm(function, layout)
    ones = np.ones((1, 1), jnp.dtype(dtype))
    if gemm(ones, ones, np.zeros((1, 1), np.float32), 0.0):
        return f"this oneDNN has no {dtype} GEMM for this processor"
    return gemm


@functools.cache
def _library():
    name = ctypes.util.find_library("dnnl")
    return ctypes.CDLL(name) if name else None


def _pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(array.shape[1])
