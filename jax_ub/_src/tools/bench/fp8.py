"""Builds the cases of linear layers with FP8 operands, in jax_ub and in XLA.

Operands are quantized before the timed call. The pair of layers is also timed with
`fp8=recipe`, which quantizes operands and gradients in the call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import jax_ub as ub
from jax_ub._src.fp8.recipes import INPUT, KERNEL, OUTPUT_GRAD, Recipe, has_one_scale
from jax_ub._src.scaled_array import ScaledArray, is_scaled
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import WIDE, Case, Setup
from jax_ub._src.tools.bench.linear import PAIR, LinearOp, memory_of
from jax_ub._src.tools.bench.peers import Dot, DotVariant
from jax_ub._src.tools.devices import AXIS, Ranks, Spec
from jax_ub._src.tools.options import Shape
from jax_ub._src.tools.timing import fastest


def linear(op: LinearOp, setup: Setup, column: Shape) -> list[Case]:
    """Returns the benchmark cases of one op, at the sizes of an MLP's column layer."""
    found = [_case(op, setup, column, quantizes=False)]
    if op is PAIR:
        found.append(_case(op, setup, column, quantizes=True))
    return found


def _case(op, setup, column, *, quantizes):
    """Returns a benchmark case in FP8; the layers quantize if `quantizes`."""
    shape, ranks, recipe = op.shape(column), setup.ranks, setup.recipe
    quantize, options = None, {"fp8": recipe}
    if not quantizes:
        quantize = functools.partial(_quantized_operands, op, recipe)
        hidden = functools.partial(_quantized, recipe, role=INPUT)
        options = {"hidden": hidden} if op.is_pair else {}
    own = op.own(setup.method, **options)
    candidate, alone = (
        op.candidates(each, WIDE, column, quantize) for each in (ranks, Ranks(1))
    )
    best = {
        name: fastest(
            [
                candidate(name, run, text)
                for text, run in _in_xla(op, setup, column, name, quantizes).items()
            ]
        )
        for name in (cases.XLA_F8, cases.XLA_QDQ)
        # XLA has no dot of values with block scales.
        if name == cases.XLA_QDQ or setup.dtype != "mxfp8"
    }
    timed = candidate(cases.OWN, own)
    in_bf16 = op.candidates(ranks, WIDE, column)(cases.BF16, op.own(setup.method))
    num_gemms = len(op.gemms)
    copied = shape.bytes(jnp.float8_e4m3fn) + shape.M * shape.N
    candidates = [
        timed,
        in_bf16,
        *best.values(),
        alone(cases.PLAIN, own),
        *cases.launches(ranks),
        cases.copy_limit((4 if op.is_pair else 1) * copied),
    ]
    memory = None
    if not op.is_pair:
        memory = memory_of(op, shape, timed, best[cases.XLA_QDQ], ranks)
    return setup.case(
        op.name,
        shape,
        candidates,
        num_gemms=num_gemms,
        variant="fp8=recipe" if quantizes else "",
        memory=memory,
    )


def _in_xla(op, setup, column, name, quantizes):
    """Returns XLA's FP8 programs for an op; the keys describe them in reports."""
    local = op.local_operands(column, setup.num_ranks)
    dots = {
        gemm: ScaledDot(
            DotVariant(gemm[-2:], sums_in_f32=True),
            setup.dots(gemm[-2:], WIDE, *operands, setup.ranks),
        )
        for gemm, operands in local.items()
    }
    layers = functools.partial(
        QuantizedCollectives,
        recipe=setup.recipe,
        dequantizes=name == cases.XLA_QDQ,
        # XLA's FP8 dot cannot multiply by scales that change along K.
        quantizes_gradients=quantizes and has_one_scale(setup.recipe),
    )
    programs = {key: _quantizing(op, run) for key, run in op.programs.items()}
    return dataclasses.replace(op, programs=programs).with_layers(layers, dots, WIDE)


def _quantizing(op, run):
    def program(layers, dots, *operands):
        pairs = zip(operands, _roles(op), strict=True)
        quantized = (
            x if role is None else layers.quantized(x, role) for x, role in pairs
        )
        return run(layers, dots, *quantized)

    return program


def _roles(op: LinearOp) -> list[str | None]:
    """Returns the roles of the operands; None for the gradient of the result."""
    roles: list[str | None] = [
        KERNEL if dims in ("KN", "NK") else INPUT for dims in op.operands
    ]
    return [*roles[:-1], None] if op.is_pair else roles


def _quantized_operands(op, recipe, ranks, operands, specs):
    """Quantizes all operands but the gradient; returns them and their specs."""
    found: list[Any] = []
    for x, spec, role in zip(operands, specs, _roles(op), strict=True):
        if role is None:
            found.append((x, spec))
            continue
        q = jax.jit(functools.partial(ub.quantize, recipe=recipe, role=role))(x)
        entries = (*spec, *[None] * (q.ndim - len(spec)))
        along = zip(entries, q.scales.shape, strict=True)
        scales = Spec(*(entry if size > 1 else None for entry, size in along))
        specs_of = ScaledArray.tree_unflatten(None, (spec, scales, spec))
        place = functools.partial(NamedSharding, ranks.mesh)
        found.append((jax.device_put(q, jax.tree.map(place, specs_of)), specs_of))
    return tuple(zip(*found, strict=True))


def _quantized(recipe: Recipe, x: Any, role: str) -> ScaledArray:
    if is_scaled(x):
        return x
    return ub.quantize(x, recipe, role=role, axis_name=AXIS)


@dataclasses.dataclass(frozen=True)
class ScaledDot:
    """XLA's dot of two FP8 operands with scales; other operands become bf16 first.

    The scales of rows are those of fprop.
    """

    fp8: Dot
    wide: Dot

    def __call__(self, a: Any, b: Any, out_dtype: Any) -> jax.Array:
        if is_scaled(a) and is_scaled(b):
            y = self.fp8(a.values, b.values, jnp.float32) * a.scales * b.scales
            return y.astype(out_dtype)
        a, b = (x.dequantize(WIDE) if is_scaled(x) else x for x in (a, b))
        return self.wide(a, b, out_dtype)


class QuantizedCollectives(peers.Collectives):
    """XLA's collectives and dots of quantized activations, kernels and gradients.

    `dequantizes` tells whether they are dequantized to bf16 before the collectives.
    """

    def __init__(
        self,
        moved: str,
        *,
        recipe: Recipe,
        dequantizes: bool,
        quantizes_gradients: bool,
    ):
        super().__init__(moved)
        self._recipe, self._dequantizes = recipe, dequantizes
        self._quantizes_gradients = quantizes_gradients

    def quantized(self, x: Any, role: str) -> Any:
        if role == OUTPUT_GRAD and not self._quantizes_gradients:
            return x
        q = _quantized(self._recipe, x, role)
        return q.dequantize(WIDE) if self._dequantizes else q

    def gather(self, x: Any) -> Any:
        if not is_scaled(x):
            return super().gather(x)
        is_per_row = x.scales.ndim and x.scales.shape[0] == x.shape[0] > 1
        scales = super().gather(x.scales) if is_per_row else x.scales
        return ScaledArray(super().gather(x.values), scales)
