"""The best that a method can do: its schedule with the fastest knobs."""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_ub.methods import Variant
from jax_ub.runtime.device_groups import ONE_SHOT_BYTES
from jax_ub.simulate import schedules
from jax_ub.simulate.hardware import Hardware
from jax_ub.simulate.replay import PlanOptions, replay
from jax_ub.simulate.timeline import Timeline
from jax_ub.simulate.workload import Workload

# The schedule that a GPU runs: all-pull in ring order; partial sums in row blocks.
_METHODS = {
    "all_gather_matmul": "ring_exchange",
    "matmul_reduce_scatter": "pipeline",
    "matmul_all_reduce": "pipeline",
}
_SPLITS = (1, 2, 4)
_STREAMS = (1, 2, 3)
# Fewer rows than this are less than a tile.
MIN_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule and its knobs, and how long the replay took."""

    method: str
    knobs: PlanOptions
    seconds: float
    variant: Variant = Variant.PLAIN

    @property
    def text(self) -> str:
        """The knobs as in tables: b row blocks, a chunks a kernel, s streams."""
        blocks = "" if self.method == "ring_exchange" else f"b{self.knobs.num_splits}"
        return f"{blocks}a{self.knobs.aggregate}s{self.knobs.streams}"


def default_method(op: str, hardware: Hardware) -> str:
    """What "auto" is: reading the peers in place on a host, copy engines on a GPU."""
    return "direct" if hardware.is_host else _METHODS.get(op, "pipeline")


def in_one_exchange(workload: Workload, hardware: Hardware) -> bool:
    """Whether "auto" sums so: few tokens, on a GPU."""
    sums = workload.op.endswith("all_reduce") and workload.num_ranks > 1
    few = workload.one_shot_bytes <= ONE_SHOT_BYTES
    return sums and few and not hardware.is_host


def best(
    workload: Workload,
    hardware: Hardware,
    method: str | None = None,
    variant: Variant | None = None,
) -> Plan:
    """Tries all knobs that make sense and keeps the fastest.

    Args:
        workload: the op.
        hardware: the machine.
        method: the schedule; None takes the one that suits the machine.
        variant: of the schedule, as the engine runs it: a kernel for each product. None
            is the plain one, with as many chunks in a kernel as is best.

    Raises:
        ValueError: if the method has no such variant for the op and the ranks.
    """
    method = method or default_method(workload.op, hardware)
    shown = variant or Variant.PLAIN

    def plan(knobs):
        found = timeline(workload, hardware, method, knobs, variant=shown)
        return Plan(method, knobs, found.seconds, shown)

    choices = list(_choices(workload, hardware, method))
    if variant is not None:
        choices = [dataclasses.replace(knobs, aggregate=1) for knobs in choices]
    plans = map(plan, dict.fromkeys(choices))
    return min(plans, key=lambda plan: plan.seconds)


def timeline(
    workload: Workload,
    hardware: Hardware,
    method: str,
    knobs: PlanOptions,
    *,
    every_rank: bool = False,
    variant: Variant = Variant.PLAIN,
) -> Timeline:
    """Replays the schedule of one rank, which stands for all, or of every rank."""
    which = schedules.every_rank if every_rank else schedules.first_rank
    ranks, splits = workload.num_ranks, knobs.num_splits
    steps = which(workload.op, method, ranks, splits, variant.value)
    if hardware.is_host:
        return replay(steps, workload, hardware, knobs)
    moved = [schedules.sums_at_once(own) for own in steps]
    return replay(moved, workload, hardware, knobs)


def _choices(workload, hardware, method) -> Iterator[PlanOptions]:
    splits = _SPLITS if method == "pipeline" else (1,)
    several = not hardware.is_host and method not in ("direct", "external")
    peers = workload.num_ranks - 1
    aggregates = [a for a in (1, 2, 4, peers) if a <= peers] if several else [1]
    if several and workload.op == "matmul_all_reduce":
        aggregates = [max(1, peers)]  # every further kernel delays the second half
    streams = _STREAMS if several else (1,)
    for num_splits, aggregate, lanes in itertools.product(
        splits, aggregates or [1], streams
    ):
        if num_splits == 1 or workload.piece_rows(num_splits) >= MIN_ROWS:
            yield PlanOptions(num_splits, aggregate, lanes)
