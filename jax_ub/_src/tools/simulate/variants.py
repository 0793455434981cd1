"""Computes the simulator's table of variants: other schedules of the same method."""

import dataclasses
from collections.abc import Iterator

from jax_ub._src.methods import Method, Variant, has_pairs
from jax_ub._src.tools.simulate import plan
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.models import Layer, Model
from jax_ub._src.tools.simulate.tables import workload_of
from jax_ub._src.tools.simulate.workload import Workload

# Tokens per rank of the one-shot all-reduces, which suit few tokens.
_TOKENS = (1, 4, 16, 64, 256)


@dataclasses.dataclass(frozen=True)
class VariantRow:
    """Predicted times of a layer's plain schedule and of a variant, in seconds.

    A variant is another schedule of the same method, such as a one-shot all-reduce,
    where each rank sends its partial sums to all peers at once.
    """

    layer: Layer
    op: str
    M: int
    method: str
    variant: Variant
    plain_s: float
    variant_s: float
    is_auto: bool  # whether "auto" selects the variant

    @property
    def short_op(self) -> str:
        """Returns the abbreviation of the collective in tables: "ag", "rs" or "ar"."""
        return self.layer.short_op if self.variant is not Variant.ONE_SHOT else "ar"

    @property
    def speedup(self) -> float:
        """Returns how many times as fast the variant is as the plain schedule."""
        return self.plain_s / self.variant_s

    def as_json(self) -> dict[str, object]:
        """Returns the row's figures as JSON types, with times in microseconds."""
        return {
            "layer": self.layer.name,
            "op": self.op,
            "M": self.M,
            "method": self.method,
            "variant": self.variant.value,
            "plain_us": 1e6 * self.plain_s,
            "variant_us": 1e6 * self.variant_s,
            "speedup": self.speedup,
            "is_auto": self.is_auto,
        }


def rows(model: Model, M: int, num_ranks: int, machine: Hardware) -> list[VariantRow]:
    """Simulates the variants of all layers' schedules and returns a row for each.

    Row-parallel layers also have rows for all-reduces of few tokens.
    """
    return [row for layer in model.layers for row in _of(layer, M, num_ranks, machine)]


def _of(layer, M, num_ranks, machine) -> Iterator[VariantRow]:
    if num_ranks == 1:
        return
    work = workload_of(layer, M, num_ranks)
    if work.gathers:
        if has_pairs(num_ranks):
            yield _row(layer, work, machine, Method.RING_EXCHANGE, Variant.AGGREGATE)
        return
    yield _row(layer, work, machine, Method.PIPELINE, Variant.OVERLAP_FIRST_GEMM)
    for tokens in _TOKENS:
        few = dataclasses.replace(work, op="matmul_all_reduce", M=tokens * num_ranks)
        yield _row(layer, few, machine, Method.RING_EXCHANGE, Variant.ONE_SHOT)


def _row(layer, work: Workload, machine, method: Method, variant):
    name = method.value
    plain = plan.best(work, machine, name, Variant.PLAIN)
    found = plan.best(work, machine, name, variant)
    one_shot = variant is Variant.ONE_SHOT
    return VariantRow(
        layer,
        work.op,
        work.M,
        name,
        variant,
        plain.seconds,
        found.seconds,
        one_shot and plan.in_one_exchange(work, machine),
    )
