"""Programs that jax_ub is compared with: XLA's collectives and dots, rings, oneDNN.

XLA's programs also multiply FP8 operands. Functions of arrays are per device, inside
`jax.shard_map`. A `dot` takes two operands and the dtype of the result.
"""

import ctypes
import ctypes.util
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ub as ub
from jax_ub._src.fp8.recipes import OUTPUT_GRAD, Recipe
from jax_ub._src.scaled_array import ScaledArray, dequantized, is_scaled
from jax_ub._src.tools.devices import AXIS, ROWS, Ranks
from jax_ub._src.tools.programs import Programs

# Maps a layout to the dimensions of (left operand, right operand, result). In a layout,
# "t" stands for a transposed operand: "nn" is used in fprop, "nt" in dgrad, "tn" in
# wgrad.
LAYOUTS = {"nn": ("MK", "KN", "MN"), "nt": ("MN", "KN", "MK"), "tn": ("MK", "MN", "KN")}
_CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


@dataclasses.dataclass(frozen=True)
class DotVariant:
    """One of several ways to write a GEMM as `lax.dot_general`, which differ in speed.

    `sums_in_f32` requests an f32 result from the dot. `upcasts` converts the operands
    to f32 first. `transposes` transposes the right operand in memory first, or the left
    one of a wgrad.

    The product of two `ScaledArray`s is the dot of their FP8 values, times both scales,
    which must be constant along the contracted dimension, as in a forward pass. If only
    one operand is FP8, it is dequantized.
    """

    layout: str
    sums_in_f32: bool = False
    upcasts: bool = False
    transposes: bool = False

    def __call__(self, a: Any, b: Any, out_dtype: Any) -> jax.Array:
        if is_scaled(a) and is_scaled(b):
            of_values = DotVariant(self.layout, sums_in_f32=True)
            y = of_values(a.values, b.values, jnp.float32) * a.scales * b.scales
            return y.astype(out_dtype)
        a, b = dequantized(a), dequantized(b)
        left, right = _CONTRACTED[self.layout]
        if self.upcasts:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        # The barrier keeps XLA from folding the transposition into the dot.
        if self.transposes and self.layout == "tn":
            a, left = lax.optimization_barrier(a.T), 1 - left
        elif self.transposes:
            b, right = lax.optimization_barrier(b.T), 1 - right
        wide = jnp.float32 if self.sums_in_f32 else a.dtype
        dims = (((left,), (right,)), ((), ()))
        y = lax.dot_general(a, b, dims, preferred_element_type=wide)
        return y.astype(out_dtype)


def dot_variants(layout: str, dtype: Any, platform: str = "cpu") -> list[DotVariant]:
    """Returns the ways to write a GEMM in XLA that are worth timing.

    Each was the fastest on some machine; the plain dot is the first. On GPUs, XLA
    accepts every layout, and upcast operands would bypass the tensor cores.
    """
    on_cpu = platform == "cpu"
    casts = [(False, False), (True, False), (True, True)][: 3 if on_cpu else 2]
    if jnp.dtype(dtype) == jnp.float32:
        casts = casts[:1]
    transposes = (False, True) if on_cpu else (False,)
    return [DotVariant(layout, *cast, each) for each in transposes for cast in casts]


@functools.cache
def fastest_dot(
    layout: str, dtype: str, left: tuple, right: tuple, ranks: Ranks
) -> DotVariant:
    """Returns the fastest way to write a GEMM in XLA on this machine.

    `left` and `right` are the operands' local shapes. All ranks compute the dot at the
    same time. With AVX512-BF16, a bf16 dot is twice as fast with an f32 result; with
    AVX2, it takes 1.5 times as long as with a bf16 result.
    """

    def program(variant, a, b):
        return variant(a[0], b[0], dtype)[None]

    specs = (ROWS, ROWS)
    operands = ranks.draw(dtype, [(ranks.num_ranks, *s) for s in (left, right)], specs)
    programs = Programs(ranks, operands, specs, ROWS)
    variants = dot_variants(layout, dtype, ranks.platform)
    functions = {variant: functools.partial(program, variant) for variant in variants}
    return programs.fastest("", functions).variant


# In the classes below, the methods that run a layer have the names of jax_ub's
# functions. `Collectives` runs the collective and the GEMM one after the other. `Rings`
# overlaps them.


@dataclasses.dataclass(eq=False)
class Collectives:
    """Tensor-parallel linear layers in XLA: a collective and a dot in sequence.

    `dots` has the GEMMs by name, and results have the dtype `dtype`. Partial sums are
    reduced in the dtype `moved`. GEMM+AR reduces them by the collective `reduction`,
    "psum" or "psum_scatter", which an all-gather follows. An array is gathered only
    once, so a new object is needed for each trace.

    With a recipe, operands are quantized to FP8, and all-gathers send FP8 values and
    scales. If `dequantizes`, the operands are dequantized to `dtype` again before the
    collectives and dots. Gradients are quantized only if `quantizes_gradients`.
    """

    dots: Mapping[str, DotVariant]
    dtype: str
    moved: str
    reduction: str = "psum_scatter"
    recipe: Recipe | None = None
    dequantizes: bool = False
    quantizes_gradients: bool = False
    _gathered: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def quantized(self, x: Any, role: str) -> Any:
        """Returns x quantized for its role: an activation, a kernel or a gradient.

        Without a recipe, x is returned as it is. An x that is FP8 keeps its values.
        """
        is_kept = role == OUTPUT_GRAD and not self.quantizes_gradients
        if self.recipe is None or is_kept:
            return x
        if not is_scaled(x):
            x = ub.quantize(x, self.recipe, role=role, axis_name=AXIS)
        return x.dequantize() if self.dequantizes else x

    def gather(self, x: Any) -> Any:
        if is_scaled(x):
            is_per_row = x.scales.ndim and x.scales.shape[0] == x.shape[0] > 1
            scales = self.gather(x.scales) if is_per_row else x.scales
            return ScaledArray(self.gather(x.values), scales)
        if id(x) not in self._gathered:
            self._gathered[id(x)] = lax.all_gather(x, AXIS, tiled=True)
        return self._gathered[id(x)]

    def all_gather_matmul(self, x: Any, w: Any, gemm: str = "column_nn") -> jax.Array:
        return self.dots[gemm](self.gather(x), w, self.dtype)

    def matmul_reduce_scatter(self, x: Any, w: Any, gemm: str = "row_nn") -> jax.Array:
        partial = self.dots[gemm](x, w, self.moved)
        return lax.psum_scatter(partial, AXIS, tiled=True).astype(self.dtype)

    def matmul_all_reduce(self, x: Any, w: Any, gemm: str = "row_nn") -> jax.Array:
        if self.reduction == "psum":
            return lax.psum(self.dots[gemm](x, w, self.moved), AXIS).astype(self.dtype)
        return self.gather(self.matmul_reduce_scatter(x, w, gemm))


class Rings(Collectives):
    """Collective matmuls in XLA: rings of `ppermute`, whose steps overlap with dots."""

    def gather(self, x: jax.Array) -> jax.Array:
        return self._gathered_map(x, lambda shard: shard)

    def all_gather_matmul(self, x: Any, w: Any, gemm: str = "column_nn") -> jax.Array:
        return self._gathered_map(x, lambda shard: self.dots[gemm](shard, w, x.dtype))

    def _gathered_map(self, x, function):
        """Concatenates `function(x)` of all ranks' x, while the next x is being sent.

        Shards move to the lower rank. In step s, rank r has shard (r + s) mod P.
        """
        num_ranks, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
        rows = x.shape[0]
        result = function(x)
        y = jnp.zeros_like(result, shape=(num_ranks * rows, result.shape[1]))
        for step in range(num_ranks):
            shard = (rank + step) % num_ranks
            y = lax.dynamic_update_slice_in_dim(y, result, shard * rows, 0)
            if step + 1 < num_ranks:
                x = lax.ppermute(x, AXIS, _neighbours(num_ranks, -1))
                result = function(x)
        return y

    def matmul_reduce_scatter(self, x: Any, w: Any, gemm: str = "row_nn") -> jax.Array:
        """Computes GEMM + reduce-scatter, passing partial sums from rank to rank.

        Each rank adds a product and sends the sum to the next higher rank. In step s,
        rank r adds its product for the rows of rank (r - 1 - s) mod P.
        """
        num_ranks, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
        rows = x.shape[0] // num_ranks

        def product(step: int) -> jax.Array:
            start = (rank - 1 - step) % num_ranks * rows
            part = lax.dynamic_slice_in_dim(x, start, rows)
            return self.dots[gemm](part, w, x.dtype)

        total = product(0)
        for step in range(1, num_ranks):
            total = product(step) + lax.ppermute(total, AXIS, _neighbours(num_ranks, 1))
        return total


def _neighbours(num_ranks, distance):
    return [(rank, (rank + distance) % num_ranks) for rank in range(num_ranks)]


_ONEDNN_GEMMS = {"float32": "dnnl_sgemm", "bfloat16": "dnnl_gemm_bf16bf16f32"}
_MATRIX = (ctypes.c_void_p, ctypes.c_int64)  # the data, and the stride of the rows
_ONEDNN_ARGUMENTS = (
    *(ctypes.c_char, ctypes.c_char, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_float, *_MATRIX, *_MATRIX, ctypes.c_float, *_MATRIX),
)


def find_onednn(dtype: str, layout: str) -> Callable[..., int] | str:
    """Returns oneDNN's GEMM for a dtype and layout, or the reason why there is none.

    `gemm(a, b, y, beta)` writes `a b + beta y` into `y`, for row-major numpy matrices
    and f32 `y`, and returns oneDNN's status, 0 for success. The bf16 GEMM cannot round
    its result to bf16, which favors oneDNN in the comparison.
    """
    library = _onednn()
    if library is None:
        return "oneDNN is not installed (Debian: apt install libdnnl2)"
    function = getattr(library, _ONEDNN_GEMMS.get(dtype, ""), None)
    if function is None:
        return f"this oneDNN has no GEMM for {dtype}"
    function.argtypes = _ONEDNN_ARGUMENTS
    transposed = (b"T" if layout == "tn" else b"N", b"T" if layout == "nt" else b"N")

    def gemm(a: np.ndarray, b: np.ndarray, y: np.ndarray, beta: float) -> int:
        sizes = (*y.shape, a.shape[0 if layout == "tn" else 1])
        left, right, out = ((x.ctypes.data, x.shape[1]) for x in (a, b, y))
        return function(*transposed, *sizes, 1.0, *left, *right, beta, *out)

    # oneDNN may not support the dtype on this processor, so a product of 1 x 1 matrices
    # is tried.
    ones = np.ones((1, 1), jnp.dtype(dtype))
    if gemm(ones, ones, np.zeros((1, 1), np.float32), 0.0):
        return f"this oneDNN has no {dtype} GEMM for this processor"
    return gemm


@functools.cache
def _onednn():
    name = ctypes.util.find_library("dnnl")
    return ctypes.CDLL(name) if name else None
