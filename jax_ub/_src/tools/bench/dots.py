"""Variants of the three GEMMs of a linear layer in XLA, and the fastest of them.

The fastest variant depends on the machine. With AVX512-BF16, a bf16 dot is twice as
fast with an f32 result; with AVX2, it takes 1.5 times as long as with a bf16 result.
All variants are therefore measured, once per layout, dtype, local size and number of
devices.

| layout | GEMM | operands | result |
|---|---|---|---|
| nn | fprop | x [M, K], w [K, N] | [M, N] |
| nt | dgrad | dy [M, N], w [K, N] | [M, K] |
| tn | wgrad | x [M, K], dy [M, N] | [K, N] |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec, normal
from jax_ub._src.tools.bench.timing import Candidate, fastest

Dot = Callable[..., jax.Array]

_CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
LAYOUTS = tuple(_CONTRACTED)


@dataclasses.dataclass(frozen=True)
class DotVariant:
    """One way to write a GEMM as `lax.dot_general` in XLA, such as with an f32 result.

    Calling it with two operands and `out_dtype` computes the product. `upcasts`
    converts the operands to f32 first. `transposes` names the operand, "left" or
    "right", that is transposed in memory first.
    """

    layout: str
    sums_in_f32: bool = False
    upcasts: bool = False
    transposes: str = ""

    def __str__(self) -> str:
        """Returns a description for tables, such as "f32 result"; never empty."""
        parts = [
            "operands upcast" if self.upcasts else "",
            "f32 result" if self.sums_in_f32 else "",
            f"{self.transposes} transposed first" if self.transposes else "",
        ]
        return ", ".join(filter(None, parts)) or "plain dot"

    def __call__(self, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
        """Computes the product of `a` and `b`, rounded to `out_dtype`."""
        contracted = list(_CONTRACTED[self.layout])
        if self.upcasts:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        # Without the barrier, XLA would fold the transposition into the dot again.
        if "left" in self.transposes:
            a, contracted[0] = lax.optimization_barrier(a.T), 1 - contracted[0]
        if "right" in self.transposes:
            b, contracted[1] = lax.optimization_barrier(b.T), 1 - contracted[1]
        wide = jnp.float32 if self.sums_in_f32 else a.dtype
        dims = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=wide).astype(
            out_dtype
        )


def ways(layout: str, dtype: Any, platform: str = "cpu") -> tuple[DotVariant, ...]:
    """Returns the dot variants that are worth timing for a layout, dtype and platform.

    Each was the fastest on some machine; the plain dot is the first. On GPUs, XLA's
    libraries accept every layout, so nothing is transposed first. Upcast operands would
    bypass the tensor cores and be an order of magnitude slower, so they are not tried
    either.
    """
    on_cpu = platform == "cpu"
    sides = ["", "left" if layout == "tn" else "right"][: 2 if on_cpu else 1]
    if jnp.dtype(dtype) == jnp.float32:
        return tuple(DotVariant(layout, transposes=side) for side in sides)
    casts = [(False, False), (True, False), (False, True)][: 3 if on_cpu else 2]
    return tuple(
        DotVariant(layout, sums_in_f32=wide or up, upcasts=up, transposes=side)
        for side in sides
        for wide, up in casts
    )


def naive(a: jax.Array, b: jax.Array, layout: str) -> jax.Array:
    """Computes a GEMM of this layout with `@` and `.T`, as most users write it."""
    if layout == "nn":
        return a @ b
    return a @ b.T if layout == "nt" else a.T @ b


class FastestDots:
    """Finds XLA's fastest variant of a GEMM on this machine, and caches it.

    The variants are timed when a GEMM's layout, dtype and sizes are first requested.
    """

    def __init__(self) -> None:
        """Creates an empty cache of the fastest variants; nothing is timed yet."""
        self._found: dict[tuple[Any, ...], DotVariant] = {}

    def __call__(
        self, layout: str, dtype: Any, left: tuple, right: tuple, ranks: Ranks
    ) -> DotVariant:
        """Returns XLA's fastest variant of a GEMM, timing all variants on first use.

        Args:
            layout: "nn", "nt" or "tn".
            dtype: dtype of both operands and the result.
            left: local shape of the left operand.
            right: local shape of the right operand.
            ranks: the devices; all of them compute the dot at the same time.
        """
        key = (layout, jnp.dtype(dtype), left, right, ranks.num_ranks)
        if key not in self._found:
            self._found[key] = self._measure(layout, dtype, left, right, ranks)
        return self._found[key]

    @property
    def found(self) -> dict[str, str]:
        """Returns a description of each measured GEMM's fastest variant."""
        return {
            f"{layout} {dtype} {left} {right} on {ranks}": str(way)
            for (layout, dtype, left, right, ranks), way in self._found.items()
        }

    def _measure(self, layout, dtype, left, right, ranks):
        every = (ranks.num_ranks,)
        operands = [
            ranks.place(normal(seed, every + shape, dtype), Spec(AXIS))
            for seed, shape in enumerate((left, right))
        ]
        specs = (Spec(AXIS), Spec(AXIS))
        candidates = {
            way: Candidate(
                str(way), ranks.program(_local(way, dtype), specs, Spec(AXIS)), operands
            )
            for way in ways(layout, dtype, ranks.platform)
        }
        best = fastest(list(candidates.values()))
        return next(way for way, c in candidates.items() if c is best)


def _local(way, dtype):
    return lambda a, b: way(a[0], b[0], dtype)[None]
