"""Searches the options of a method's schedule for the fastest simulated time."""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_ub._src.methods import Variant
from jax_ub._src.runtime.device_groups import ONE_SHOT_BYTES
from jax_ub._src.tools.simulate import schedules
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.replay import PlanOptions, replay
from jax_ub._src.tools.simulate.timeline import Timeline
from jax_ub._src.tools.simulate.workload import Workload

# Methods that "auto" selects on GPUs: a ring of copies for gathered operands, and a
# pipeline of row blocks for partial sums.
_METHODS = {
    "all_gather_matmul": "ring_exchange",
    "matmul_reduce_scatter": "pipeline",
    "matmul_all_reduce": "pipeline",
}
_SPLITS = (1, 2, 4)
_STREAMS = (1, 2, 3)
# Splits of fewer rows would be smaller than a tile.
MIN_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule with its options, and the seconds that it takes in the simulator."""

    method: str
    knobs: PlanOptions
    seconds: float
    variant: Variant = Variant.PLAIN

    @property
    def text(self) -> str:
        """Returns the options in the short format of tables, such as "b4a1s2".

        b is the number of row blocks, a the chunks per kernel, s the streams.
        """
        blocks = "" if self.method == "ring_exchange" else f"b{self.knobs.num_splits}"
        return f"{blocks}a{self.knobs.aggregate}s{self.knobs.streams}"


def default_method(op: str, hardware: Hardware) -> str:
    """Returns the method that "auto" selects for an op on this machine.

    On a host, operands are read in place from the peers' memory. On GPUs, copy engines
    transfer chunks in a ring or, for partial sums, in row blocks.
    """
    return "direct" if hardware.is_host else _METHODS.get(op, "pipeline")


def in_one_exchange(workload: Workload, hardware: Hardware) -> bool:
    """Returns whether "auto" selects a one-shot all-reduce, as for few tokens on a GPU.

    In a one-shot all-reduce, each rank sends its partial sums to all peers at once.
    """
    sums = workload.op.endswith("all_reduce") and workload.num_ranks > 1
    few = workload.one_shot_bytes <= ONE_SHOT_BYTES
    return sums and few and not hardware.is_host


def best(
    workload: Workload,
    hardware: Hardware,
    method: str | None = None,
    variant: Variant | None = None,
) -> Plan:
    """Simulates all reasonable options of a method's schedule and returns the fastest.

    Args:
        workload: the op and its sizes.
        hardware: the machine.
        method: the method; None selects the machine's default.
        variant: the variant of the schedule, with one kernel per product as the engine
            runs it. None selects the plain variant with the best number of chunks per
            kernel.

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
    """Simulates a schedule with the given options and returns the times of all steps.

    It simulates rank 0, which represents all ranks, unless `every_rank` is set.
    """
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
        # All peers' chunks in one kernel. More kernels would delay the all-gather.
        aggregates = [max(1, peers)]
    streams = _STREAMS if several else (1,)
    for num_splits, aggregate, lanes in itertools.product(
        splits, aggregates or [1], streams
    ):
        if num_splits == 1 or workload.piece_rows(num_splits) >= MIN_ROWS:
            yield PlanOptions(num_splits, aggregate, lanes)
