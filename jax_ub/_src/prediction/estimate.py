"""Predicts the time of one call, whether XLA is faster, and what FP8 saves in it."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jax_ub._src import methods
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.methods import KernelOptions, Method, Variant
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.prediction.cost import (
    PRODUCTS,
    Gemm,
    Workload,
    bounds,
    library_seconds,
)
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.prediction.replay import PlanOptions, Span, end_s, replay, steps_of
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Ops that run a local GEMM and a collective of an activation or a gradient of the same
# layer, concurrently where possible: {op: collective}.
_CONCURRENT = {
    "bulk_all_gather": "all_gather",
    "bulk_reduce_scatter": "reduce_scatter",
    "wgrad": "all_gather",
}
OPS = (*PRODUCTS, *_COLLECTIVES, *_CONCURRENT, "matmul")
_SPLITS = (1, 2, 4)
_STREAMS = (1, 2, 3)
# Memory traffic in bytes per element of a cast to FP8 with a scale per tensor or row:
# bf16 is read twice, to find the largest value and to cast, and e4m3 is written.
_CAST_BYTES = 2 + 2 + 1
_MIN_ROWS = 64  # A split with fewer rows would be smaller than a tile.
# The machine for which calls are predicted if the cost model does not know their GPUs.
_ASSUMED = "h100"
# How long a host takes to enqueue one launch. Measured on one H100: 154 to 254 us for
# calls of 19 to 36 launches (docs/gpu/2026-11-27).
_ENQUEUE_S = 7.5e-6


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of one call on one rank, and its parts, in seconds.

    Attributes:
        knobs: options of the fastest schedule, such as "b4a1s2": 4 row blocks, 1 chunk
            per kernel, 2 streams. Empty without a schedule.
        gemm_s: time of its GEMM alone, at the machine's full rate.
        wire_s: time of its transfers alone, at the wire's full bandwidth.
        serial_s: time of the library's GEMM followed by the vendor's collective.
        moved_bytes: bytes that each rank sends, and also receives.
        variant: "one_shot" if "auto" sums few tokens in one exchange on a GPU.
        num_launches: number of kernels and copies that a GPU launches; 0 without a
            schedule.
    """

    op: str
    method: str
    knobs: str
    seconds: float
    gemm_s: float
    wire_s: float
    serial_s: float
    moved_bytes: float
    variant: str = Variant.PLAIN.value
    num_launches: int = 0


def predict(*arguments, **options) -> float:
    """Predicts the seconds of one call; takes the same arguments as `estimate`."""
    return estimate(*arguments, **options).seconds


def estimate(
    op: str,
    method: str,
    M: int,
    K: int,
    N: int,
    P: int,
    dtype,
    hardware: str | Hardware = "h200",
) -> Prediction:
    """Predicts the time of one call of jax_ub with the simulator's cost model.

    Args:
        op: name of the FFI target without "jax_ub$", such as "all_gather_matmul".
        method: name of a method; "auto" runs as on the machine, "xla" is the library's
            GEMM and the vendor's collective one after the other.
        M: number of tokens, summed over all ranks.
        K: global contracting size; for collectives, bulk ops and wgrad, the number of
            features of the communicated tensor.
        N: global number of output features; ignored for collectives.
        P: number of ranks.
        dtype: dtype of the operands.
        hardware: "a100", "h100", "h200", "b200", "cpu", or a `Hardware`.
    """
    if op not in OPS:
        raise UnknownNameError(
            f"simulate: op {shown(op)} is not known. {nearest(op, OPS)}"
        )
    if min(M, K, N, P) < 1:
        raise ShapeContractError(
            f"simulate: {op} of M = {M}, K = {K}, N = {N} on P = {P} ranks. Give sizes "
            "of at least 1."
        )
    chosen = methods.resolve("simulate", method, None)
    machine = machines.find(hardware)
    itemsize = np.dtype(dtype).itemsize
    if op in _CONCURRENT or op == "matmul":
        return _estimate_concurrent(op, chosen, (M, K, N, P), itemsize, machine)
    sizes = (M, K, N if op in PRODUCTS else K, P)
    return estimate_workload(_workload(op, sizes, itemsize, machine), chosen, machine)


def estimate_on_gpus(
    op: str,
    method: str,
    sizes: tuple[int, int, int, int],
    dtype,
    devices: Sequence[jax.Device],
) -> Prediction | None:
    """Predicts the time of a call on the GPUs for which it is lowered.

    Returns None if `devices` are no GPUs or the call is not modeled. XLA captures no
    calls of a process with several GPUs, so their hosts enqueue each launch. `sizes`
    are M, K, N and P of `estimate`.
    """
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    is_modeled = op in OPS and np.dtype(dtype).itemsize in machines.ITEMSIZES
    if not is_modeled or min(sizes) < 1:
        return None
    name = machines.name_of_kind(devices[0].device_kind) or _ASSUMED
    found = estimate(op, method, *sizes, dtype, name)
    in_process = collections.Counter(device.process_index for device in devices)
    if max(in_process.values()) > 1:
        enqueued_s = found.num_launches * _ENQUEUE_S
        found = dataclasses.replace(found, seconds=max(found.seconds, enqueued_s))
    return found


def why_xla_is_faster(found: Prediction, devices: Sequence[jax.Device]) -> str | None:
    """Returns why XLA should run a call with method "auto"; None if it should not.

    Only a GEMM that overlaps its own communication is left to XLA. For other calls, the
    predictions differ only by the assumed efficiencies of the collectives.
    """
    if found.op not in PRODUCTS or found.variant == Variant.ONE_SHOT.value:
        return None
    is_known = machines.name_of_kind(devices[0].device_kind) is not None
    if not is_known or found.seconds <= found.serial_s:
        return None
    overlapped_us, xla_us = (1e6 * s for s in (found.seconds, found.serial_s))
    return (
        f"overlapped it is predicted to take {overlapped_us:.0f} us, and as XLA's GEMM "
        f"and collective {xla_us:.0f} us (docs/simulate.md); `python -m jax_ub tune` "
        "measures it"
    )


def _workload(op, sizes, itemsize, machine):
    # CPUs exchange partial sums in f32; a GPU rounds them before it sends them.
    with_product = op in PRODUCTS and op != "all_gather_matmul"
    # Partial sums of FP8 products have 2 bytes, not the 1 byte of their operands.
    partial = 4 if machine.is_host and with_product else max(itemsize, 2)
    M, K, N, P = sizes
    return Workload(op, M, K, N, P, itemsize, partial)


def estimate_workload(work: Workload, method: Method, machine: Hardware) -> Prediction:
    parts = bounds(work, machine)
    name, variant = _schedule_name(work, method, machine), Variant.PLAIN
    moved_bytes, wire_s = work.moved_bytes, parts.wire_s
    knobs, num_launches = "", 0
    if _is_one_shot(work, method, machine):
        name, variant = Method.RING_EXCHANGE.value, Variant.ONE_SHOT
        moved_bytes = work.one_shot_bytes
        wire_s = moved_bytes / machine.wire_bytes_per_s
    if method is Method.XLA:
        seconds = parts.serial_s
    elif name == Method.DIRECT.value:
        seconds = direct_seconds(work, machine)
    else:
        knobs, seconds, num_launches = fastest_plan(
            work, machine, name, variant, is_default=method is Method.AUTO
        )
    return Prediction(
        op=work.op,
        method=name,
        knobs=knobs,
        seconds=max(seconds, parts.gemm_s),
        gemm_s=parts.gemm_s,
        wire_s=wire_s,
        serial_s=parts.serial_s,
        moved_bytes=moved_bytes,
        variant=variant.value,
        num_launches=num_launches,
    )


def _is_one_shot(work, method, machine):
    is_direct = method is Method.DIRECT and not work.has_product
    chooses = method is Method.AUTO or is_direct
    sums = work.op.endswith("all_reduce") and work.num_ranks > 1
    is_small = work.one_shot_bytes <= ONE_SHOT_BYTES
    return chooses and sums and is_small and not machine.is_host


def _schedule_name(work, method, machine):
    if method is Method.AUTO:
        # On a CPU host, "auto" reads operands in place from the peers' memory, which is
        # method "direct".
        on_gpus = methods.auto_on_gpus(gathers=work.gathers)
        return (Method.DIRECT if machine.is_host else on_gpus).value
    if not work.has_product and method is Method.DIRECT and not machine.is_host:
        return Method.BULK.value
    if work.has_product and method is Method.BULK:
        return Method.RING_EXCHANGE.value  # "bulk" uses it in the forward pass
    return method.value


def direct_seconds(work: Workload, machine: Hardware) -> float:
    """Predicts the seconds of method "direct", whose GEMM reads the peers' memory.

    A barrier follows the GEMM. On a GPU, the GEMM takes at least the time of its
    transfers. A collective has only transfers.
    """
    part = machine.shared_by(work.num_ranks)
    barrier_s = machine.handshake_s if work.num_ranks > 1 else 0.0
    if not work.has_product:
        return work.moved_bytes / part.wire_bytes_per_s + machine.handshake_s
    gemm_s = library_seconds(part, work.gemm, work.rate_itemsize)
    if not machine.is_host:
        gemm_s = max(gemm_s, work.moved_bytes / part.copy_bytes_per_s)
    return machine.launch_s + gemm_s + barrier_s


def fastest_plan(
    work: Workload,
    machine: Hardware,
    method: str,
    variant: Variant,
    *,
    is_default: bool,
) -> tuple[str, float, int]:
    """Finds the schedule options that are predicted fastest, by simulating each.

    Returns the options as text, the seconds, and the number of GPU launches. If
    `is_default`, only the options that the engine runs untuned are simulated.
    """
    options = list(_options(work, machine, method))
    if is_default:
        streams = 1 if machine.is_host else KernelOptions.num_lanes
        options = [PlanOptions(streams=streams)]
    spans = {one: timeline(work, machine, method, one, variant) for one in options}
    best = min(spans, key=lambda one: end_s(spans[one]))
    blocks = "" if method == "ring_exchange" else f"b{best.num_splits}"
    knobs = f"{blocks}a{best.aggregate}s{best.streams}"
    # In a one-shot all-reduce, the kernel that sums also sends the data, so that the
    # schedule's puts need no launch.
    is_one_shot = variant is Variant.ONE_SHOT
    launched = [s for s in spans[best] if not (is_one_shot and s.kind == "put")]
    return knobs, end_s(spans[best]), len(launched)


def timeline(
    work: Workload,
    machine: Hardware,
    method: str,
    options: PlanOptions,
    variant: Variant = Variant.PLAIN,
    *,
    every_rank: bool = False,
) -> list[Span]:
    """Simulates a call; returns the timed steps of rank 0, or of every rank."""
    ranks = range(work.num_ranks if every_rank else 1)
    sizes = work.num_ranks, options.num_splits
    steps = [
        steps_of(work.op, method, rank, *sizes, variant=variant.value) for rank in ranks
    ]
    return replay(steps, work, machine, options)


def _options(work, machine, method) -> Iterator[PlanOptions]:
    splits = _SPLITS if method == "pipeline" else (1,)
    aggregates = streams = [1]
    if not machine.is_host and method != "external":
        streams = list(_STREAMS)
        peers = max(1, work.num_ranks - 1)
        aggregates = [a for a in (1, 2, 4, peers) if a <= peers]
        if work.op == "matmul_all_reduce":
            # One kernel multiplies all peers' chunks, because more kernels would delay
            # the all-gather of the sums, which ends the all-reduce.
            aggregates = [peers]
    for num_splits, *kernels in itertools.product(splits, aggregates, streams):
        if num_splits == 1 or work.split_rows(num_splits) >= _MIN_ROWS:
            yield PlanOptions(num_splits, *kernels)


def _estimate_concurrent(op, method, sizes, itemsize, machine):
    M, K, N, P = sizes
    local = Gemm(M, N // P, K)
    part = machine.shared_by(P)
    gemm_s = local.flops / part.flops_of(itemsize)
    library_s = library_seconds(part, local, itemsize)
    if op == "matmul" or P == 1:
        return Prediction(op, method.value, "", library_s, gemm_s, 0.0, library_s, 0.0)
    work = _workload(_CONCURRENT[op], (M, K, K, P), itemsize, machine)
    sent = estimate_workload(work, method, machine)
    serial_s = library_s + sent.serial_s
    is_hidden = method is not Method.XLA and op != "wgrad" and not machine.is_host
    seconds = max(library_s, sent.seconds) if is_hidden else library_s + sent.seconds
    if machine.is_host and op == "wgrad" and sent.method == Method.DIRECT.value:
        # The GEMM reads the peers' operands in place, so there is no separate transfer.
        seconds = library_s
    return dataclasses.replace(
        sent, op=op, seconds=seconds, gemm_s=gemm_s, serial_s=serial_s, variant="plain"
    )


@dataclasses.dataclass(frozen=True)
class Fp8Prediction:
    """The predicted seconds of a forward pass in bf16 and in FP8.

    `fp8_s` includes the cast of x, but not that of the kernel, which is cast once per
    step. `wire_s` is the time in bf16 with `wire_dtype="fp8"`.
    """

    bf16_s: float
    fp8_s: float
    wire_s: float


def predict_fp8(work: Workload, machine: Hardware) -> Fp8Prediction:
    """Predicts the seconds of an op in bf16, with FP8 operands, and if it sends FP8.

    The last variant multiplies bf16, and sends it as FP8 (`wire_dtype="fp8"`).
    """
    if not machine.has_fp8:
        raise UnsupportedOverlapError(
            f"simulate: {machine.name} has no FP8 GEMM. Use another --hardware, such "
            "as h100."
        )
    part = machine.shared_by(work.num_ranks)

    def cast_s(num_elements):
        return _CAST_BYTES * num_elements / part.memory_bytes_per_s

    # A CPU multiplies FP8 operands as bf16, so its GEMM has the rate of bf16.
    gemm_itemsize = 2 if machine.is_host else 1
    x_size = work.M * work.K // work.num_ranks
    sent = dataclasses.replace(work, itemsize=1) if work.gathers else work
    fp8 = dataclasses.replace(sent, gemm_itemsize=gemm_itemsize)
    bf16_s = estimate_workload(work, Method.AUTO, machine).seconds
    fp8_s = estimate_workload(fp8, Method.AUTO, machine).seconds + cast_s(x_size)
    return Fp8Prediction(bf16_s, fp8_s, _wire_seconds(work, machine, cast_s))


def _wire_seconds(work, machine, cast_s):
    """Predicts the seconds of a forward pass that sends FP8 (`wire_dtype="fp8"`).

    Only the CPU engine overlaps the communication, and only an all-gather. Otherwise
    the GEMM and the collective run one after the other.
    """
    rows = dataclasses.replace(work, itemsize=1, partial_itemsize=1, gemm_itemsize=2)
    if work.num_ranks == 1:
        return estimate_workload(work, Method.AUTO, machine).seconds
    if work.gathers:
        plan = Method.AUTO if machine.is_host else Method.XLA
        seconds = estimate_workload(rows, plan, machine).seconds
        widened = 0 if machine.is_host else work.M * work.K
        return seconds + cast_s(work.M * work.K // work.num_ranks) + cast_s(widened) / 2
    # A rank casts M * N partial sums before it sends them. It then sums as many
    # received ones, which takes about as long; hence the factor 2.
    return bounds(rows, machine).serial_s + 2 * cast_s(work.M * work.N)
