"""Tables of the model: layers, and whole transformer layers."""

import dataclasses
from collections.abc import Iterable

from jax_ub.simulate import plan
from jax_ub.simulate.bounds import Bounds, bounds
from jax_ub.simulate.hardware import Hardware
from jax_ub.simulate.models import Layer, Model
from jax_ub.simulate.plan import Plan
from jax_ub.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One linear layer's forward on P ranks; seconds."""

    model: str
    layer: Layer
    M: int
    num_ranks: int
    bounds: Bounds
    plan: Plan

    @property
    def plan_s(self) -> float:
        """The best schedule; power bounds it as it bounds the library."""
        return max(self.plan.seconds, self.bounds.gemm_s)

    @property
    def speedup(self) -> float:
        """The schedule over the library's GEMM and collective in turn."""
        return self.bounds.serial_s / self.plan_s

    @property
    def limit(self) -> float:
        """The speed-up that no schedule exceeds."""
        return self.bounds.serial_s / self.bounds.ideal_s

    @property
    def share_of_ideal(self) -> float:
        """How near the schedule comes to that."""
        return self.bounds.ideal_s / self.plan_s

    @property
    def hidden(self) -> float:
        """The part of the collective's time that the schedule saves."""
        saved = self.bounds.serial_s - self.plan_s
        return saved / self.bounds.collective_s if self.bounds.collective_s else 0.0

    def as_json(self) -> dict[str, object]:
        """Everything, in JSON's types; microseconds."""
        return {
            "model": self.model,
            "layer": self.layer.name,
            "op": self.layer.op,
            "M": self.M,
            "K": self.layer.K,
            "N": self.layer.N,
            "num_ranks": self.num_ranks,
            "gemm_us": 1e6 * self.bounds.gemm_s,
            "wire_us": 1e6 * self.bounds.wire_s,
            "serial_us": 1e6 * self.bounds.serial_s,
            "ideal_us": 1e6 * self.bounds.ideal_s,
            "plan_us": 1e6 * self.plan_s,
            "method": self.plan.method,
            "knobs": self.plan.text,
            "speedup": self.speedup,
            "limit": self.limit,
            "share_of_ideal": self.share_of_ideal,
            "hidden": self.hidden,
        }


def workload_of(layer: Layer, M: int, num_ranks: int) -> Workload:
    """A layer's forward in bf16."""
    return Workload(layer.op, M, layer.K, layer.N, num_ranks)


def layer_row(
    model: Model, layer: Layer, M: int, num_ranks: int, machine: Hardware
) -> LayerRow:
    """Bounds and best plan of one layer."""
    workload = workload_of(layer, M, num_ranks)
    return LayerRow(
        model.name,
        layer,
        M,
        num_ranks,
        bounds(workload, machine),
        plan.best(workload, machine),
    )


@dataclasses.dataclass(frozen=True)
class Total:
    """The layers of a transformer layer one after the other; seconds."""

    serial_s: float
    ideal_s: float
    plan_s: float


def total(rows: Iterable[LayerRow]) -> Total:
    """Adds layers up."""
    rows = list(rows)
    return Total(
        sum(row.bounds.serial_s for row in rows),
        sum(row.bounds.ideal_s for row in rows),
        sum(row.plan_s for row in rows),
    )
