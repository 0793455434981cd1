"""Simulates the schedule of a traced call with the durations that were measured."""

import dataclasses
import statistics
from collections.abc import Sequence

from jax_ub._src.tools.simulate import hardware, schedules
from jax_ub._src.tools.simulate.replay import PlanOptions, replay
from jax_ub._src.tools.simulate.timeline import Timeline
from jax_ub._src.tools.simulate.workload import Workload
from jax_ub._src.tools.trace.spans import AROUND, Call, Span

# Ops that run a collective concurrently with an independent GEMM. The value is the
# collective, whose schedule is simulated.
_PATTERNS = {
    "bulk_all_gather": "all_gather",
    "bulk_reduce_scatter": "reduce_scatter",
    "wgrad": "all_gather",
}


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Median durations of a traced call's steps in seconds, by kind of step."""

    multiply: float
    put: float
    copy: float
    reduce: float


def replayed(call: Call, spans: Sequence[Span]) -> Timeline | None:
    """Simulates a traced call as if every step took the median time of its kind.

    A recorded span that starts or ends later shows a delay that the schedule does not
    explain. Returns None if the call has no schedule of steps, as with method "direct".
    """
    steps = [span for span in spans if span.kind not in AROUND and span.rank >= 0]
    if not any(span.kind == "put" for span in steps):
        return None
    num_splits = 1 + max(span.split for span in steps)
    times = StepTimes(
        **{
            field.name: _median(steps, field.name)
            for field in dataclasses.fields(StepTimes)
        }
    )
    pattern = _PATTERNS.get(call.op, call.op)
    every = schedules.every_rank(
        pattern, call.method, call.num_ranks, num_splits, call.variant
    )
    whole = all(span.chunk < 0 for span in steps if span.kind == "multiply")
    work, machine = _costs(pattern, call.num_ranks, num_splits, times, whole=whole)
    return replay(every, work, machine, PlanOptions(num_splits))


def _median(steps, kind):
    return statistics.median([s.seconds for s in steps if s.kind == kind] or [0.0])


def _costs(pattern, num_ranks, num_splits, times, *, whole):
    """Returns a workload of unit sizes, and rates that give each step its time.

    On a host, a GEMM takes 2 m n k / (rate / P), a put bytes / (wire / P), and a sum or
    copy bytes / (memory / P) seconds.
    """
    work = Workload(pattern, num_ranks * num_splits, num_ranks, num_ranks, num_ranks)
    tiny = 1e-12
    gemm = work.gemm if whole else work.gemm_of(1)
    put_bytes = work.wire_bytes("operand", 1)
    if "gather" in pattern:
        moved, took = 2 * put_bytes, times.copy
    else:
        moved, took = work.reduce_bytes(1), times.reduce
    machine = dataclasses.replace(
        hardware.host(1.0, 1.0),
        flops_per_s=num_ranks * gemm.flops / max(times.multiply, tiny),
        wire_bytes_per_s=num_ranks * put_bytes / max(times.put, tiny),
        memory_bytes_per_s=num_ranks * moved / max(took, tiny),
        launch_s=0.0,
        handshake_s=0.0,
    )
    return work, machine
