"""FP8 operands of linear layers, and XLA's programs that multiply them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import jax_ub as ub
from jax_ub._src.fp8.recipes import OUTPUT_GRAD, Recipe
from jax_ub._src.scaled_array import ScaledArray, is_scaled
from jax_ub._src.tools.bench import peers
from jax_ub._src.tools.bench.cases import WIDE
from jax_ub._src.tools.bench.peers import Dot
from jax_ub._src.tools.devices import AXIS, Ranks, Spec


def quantized_operand(
    ranks: Ranks, recipe: Recipe, x: jax.Array, spec: Spec, role: str | None
) -> tuple[Any, Any]:
    """Quantizes a global array to FP8; returns it, sharded, and its partition specs.

    `role` says whether it is, for example, an activation or a kernel. With a role of
    None, the array is returned as it is.
    """
    if role is None:
        return x, spec
    q = jax.jit(functools.partial(ub.quantize, recipe=recipe, role=role))(x)
    entries = (*spec, *[None] * (q.ndim - len(spec)))
    along = zip(entries, q.scales.shape, strict=True)
    scales = Spec(*(entry if size > 1 else None for entry, size in along))
    specs = ScaledArray.tree_unflatten(None, (spec, scales, spec))
    place = functools.partial(NamedSharding, ranks.mesh)
    return jax.device_put(q, jax.tree.map(place, specs)), specs


def quantized(recipe: Recipe, x: Any, role: str) -> ScaledArray:
    """Quantizes a rank's array to FP8, in `jax.shard_map`; keeps it if it is FP8."""
    if is_scaled(x):
        return x
    return ub.quantize(x, recipe, role=role, axis_name=AXIS)


@dataclasses.dataclass(frozen=True)
class ScaledDot:
    """Multiplies two `ScaledArray`s in XLA: the dot of FP8 values, times both scales.

    `fp8` is the dot of FP8 values. If only one operand is FP8, it is dequantized, and
    `wide` multiplies the bf16 arrays. The scales must be constant along the contracted
    dimension, as in a forward pass.
    """

    fp8: Dot
    wide: Dot

    def __call__(self, a: Any, b: Any, out_dtype: Any) -> jax.Array:
        if is_scaled(a) and is_scaled(b):
            y = self.fp8(a.values, b.values, jnp.float32) * a.scales * b.scales
            return y.astype(out_dtype)
        a, b = (x.dequantize(WIDE) if is_scaled(x) else x for x in (a, b))
        return self.wide(a, b, out_dtype)


@dataclasses.dataclass(eq=False, kw_only=True)
class QuantizedCollectives(peers.Collectives):
    """All-gather + GEMM and GEMM + reduce-scatter in XLA, on operands quantized to FP8.

    All-gathers send FP8 values and scales. If `dequantizes`, the operands are
    dequantized to bf16 again before the collectives and dots. Gradients are quantized
    only if `quantizes_gradients`.
    """

    recipe: Recipe
    dequantizes: bool
    quantizes_gradients: bool

    def quantized(self, x: Any, role: str | None) -> Any:
        if role is None or (role == OUTPUT_GRAD and not self.quantizes_gradients):
            return x
        q = quantized(self.recipe, x, role)
        return q.dequantize(WIDE) if self.dequantizes else q

    def gather(self, x: Any) -> Any:
        if not is_scaled(x):
            return super().gather(x)
        is_per_row = x.scales.ndim and x.scales.shape[0] == x.shape[0] > 1
        scales = super().gather(x.scales) if is_per_row else x.scales
        return ScaledArray(super().gather(x.values), scales)
