"""Computes the rows of the simulator's table of linear layers, and their totals."""

import dataclasses
from collections.abc import Iterable

from jax_ub._src.tools.simulate import plan
from jax_ub._src.tools.simulate.bounds import Bounds, bounds
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.models import Layer, Model
from jax_ub._src.tools.simulate.plan import Plan
from jax_ub._src.tools.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """The predicted forward pass of a linear layer on several ranks; times in seconds.

    `bounds` has the times without overlap and with perfect overlap. `plan` is the
    fastest schedule that the simulator found.
    """

    model: str
    layer: Layer
    M: int
    num_ranks: int
    bounds: Bounds
    plan: Plan

    @property
    def plan_s(self) -> float:
        """Returns the time of the plan, but at least the time of the GEMM.

        A GEMM cannot be faster than the rate that the GPU's power limit allows.
        """
        return max(self.plan.seconds, self.bounds.gemm_s)

    @property
    def speedup(self) -> float:
        """Returns the plan's speed-up over a library's GEMM and then a collective."""
        return self.bounds.serial_s / self.plan_s

    @property
    def limit(self) -> float:
        """Returns the speed-up with perfect overlap, the largest possible one."""
        return self.bounds.serial_s / self.bounds.ideal_s

    @property
    def share_of_ideal(self) -> float:
        """Returns the time with perfect overlap divided by the plan's time.

        The quotient is at most 1.
        """
        return self.bounds.ideal_s / self.plan_s

    @property
    def hidden(self) -> float:
        """Returns the share of the collective's time that the plan saves by overlap."""
        saved = self.bounds.serial_s - self.plan_s
        return saved / self.bounds.collective_s if self.bounds.collective_s else 0.0

    def as_json(self) -> dict[str, object]:
        """Returns the row's figures as JSON types, with times in microseconds."""
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
    """Returns the workload of a layer's forward pass in bf16, for the simulator."""
    return Workload(layer.op, M, layer.K, layer.N, num_ranks)


def layer_row(
    model: Model, layer: Layer, M: int, num_ranks: int, machine: Hardware
) -> LayerRow:
    """Simulates a linear layer's forward pass and returns its row of the table."""
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
    """Sums of the times of all linear layers of a transformer layer, in seconds."""

    serial_s: float
    ideal_s: float
    plan_s: float


def total(rows: Iterable[LayerRow]) -> Total:
    """Returns the sums of the serial, ideal and plan times over all rows."""
    rows = list(rows)
    return Total(
        sum(row.bounds.serial_s for row in rows),
        sum(row.bounds.ideal_s for row in rows),
        sum(row.plan_s for row in rows),
    )
