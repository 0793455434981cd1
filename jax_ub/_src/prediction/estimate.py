"""Predicts the time of one call, and whether XLA is faster."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_ub._src.methods import Method, MethodChoice, Variant, auto_on_gpus
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.replay import PRODUCTS, Replay, Workload, gemm_s
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Ops that run a local GEMM and, concurrently if possible, a collective of an activation
# or a gradient of the same layer: {op: collective}. "matmul" runs no collective.
_CONCURRENT = {
    "bulk_all_gather": "all_gather",
    "bulk_reduce_scatter": "reduce_scatter",
    "wgrad": "all_gather",
    "matmul": "all_gather",
}
OPS = (*PRODUCTS, *_COLLECTIVES, *_CONCURRENT)
# Stands for unknown GPUs, on which every call overlaps: XLA's collectives never end.
_UNKNOWN_GPU = dataclasses.replace(hardware.HARDWARE["h100"], collective_s=math.inf)
# Seconds that a host takes to enqueue one kernel launch. Measured on one H100: 154 to
# 254 us for calls of 19 to 36 launches (docs/gpu/2026-11-27).
_ENQUEUE_S = 7.5e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one call on one rank, and its parts, in seconds.

    Attributes:
        method: name of the method that the machine's engine runs.
        seconds: time of the call.
        gemm_s, wire_s: time of the GEMM and of the communication, each alone and at the
            full rate.
        library_gemm_s, collective_s: the same by a vendor's library, which sends
            partial sums in the dtype of the result.
        plain_s: time of the call by method "xla", jax_ub's plain `jax.lax`, which sends
            partial sums in f32.
        moved_bytes: bytes that each rank sends, and also receives.
        variant: "one_shot" if "auto" sums few tokens in one exchange on a GPU.
        why_xla_is_faster: the reason if "auto" leaves a call on GPUs to XLA, or None.
    """

    op: str
    method: str
    gemm_s: float
    wire_s: float
    library_gemm_s: float
    collective_s: float
    plain_s: float
    moved_bytes: float
    variant: str
    seconds: float
    why_xla_is_faster: str | None

    @property
    def ideal_s(self) -> float:
        return max(self.gemm_s, self.wire_s)

    @property
    def serial_s(self) -> float:
        return self.library_gemm_s + self.collective_s


def estimate(  # noqa: PLR0913, the call and the machine
    op: str,
    choice: MethodChoice,
    M: int,
    K: int,
    N: int,
    P: int,
    dtype,
    machine: hardware.Hardware,
    gathered_dtype=None,
    enqueue_s: float = 0.0,
) -> Prediction:
    """Predicts the time of one call of jax_ub with the simulator's cost model.

    Args:
        op: name of the FFI target without "jax_ub$", such as "all_gather_matmul".
        choice: the method and its options; "auto" may run as "xla" on a GPU.
        M: number of tokens, summed over all ranks.
        K: global contracting size; for collectives, bulk ops and wgrad, the number of
            features of the communicated tensor.
        N: global number of output features; ignored for collectives.
        P: number of ranks.
        dtype: dtype of the operands.
        machine: a machine of `HARDWARE` or another one.
        gathered_dtype: dtype in which an array is all-gathered, if it is not `dtype`,
            as with `wire_dtype="fp8"`.
        enqueue_s: seconds that a host needs for each launch on a GPU.
    """
    part, itemsize = machine.shared_by(P), np.dtype(dtype).itemsize
    if op == "matmul":  # a rank's GEMM, without communication
        N, P = N // P, 1
    work = Workload(
        *(_CONCURRENT.get(op, op), M, K, N, P),
        itemsize=itemsize,
        # CPUs exchange partial sums of products in f32. GPUs first round them to the
        # dtype of the operands, or to 16 bits for FP8 operands.
        partial_itemsize=4 if op in PRODUCTS and part.is_host else max(itemsize, 2),
        gathered_itemsize=np.dtype(gathered_dtype or dtype).itemsize,
    )
    if op in _CONCURRENT and P == 1:
        choice = MethodChoice(Method.XLA)  # nothing to communicate
    run = _as_run(work, choice, machine)
    alone_s = library_gemm_s = 0.0
    if op not in _COLLECTIVES:
        alone_s, library_gemm_s = gemm_s(work.gemm_of(M), part)
    # XLA:CPU converts bf16 to f32 before a collective. XLA on GPUs does not.
    xla_itemsize = 4 if part.is_host and work.sent_itemsize == 2 else work.sent_itemsize
    plain_itemsize = xla_itemsize if work.gathers else max(xla_itemsize, 4)
    itemsizes = work.sent_itemsize, xla_itemsize, plain_itemsize
    moved_bytes, xla_bytes, plain_bytes = map(work.moved_bytes, itemsizes)
    is_one_shot = run.kernel_options.variant is Variant.ONE_SHOT
    if is_one_shot:
        moved_bytes = work.one_shot_bytes
    wire_s = moved_bytes / part.wire_bytes_per_s
    seconds = plain_s = library_gemm_s + part.vendor_collective_s(plain_bytes)
    if run.method is not Method.XLA:
        times = library_gemm_s, wire_s, enqueue_s
        seconds = max(alone_s, _engine_s(op, work, run, machine, *times))
    reason = None
    # "auto" leaves only GEMMs that overlap their own communication to XLA. For other
    # calls, the predictions differ only by the assumed efficiencies of the collectives.
    is_auto_on_gpus = choice.method is Method.AUTO and not machine.is_host
    may_be_left = is_auto_on_gpus and op in PRODUCTS and not is_one_shot
    if may_be_left and seconds > plain_s:
        reason = (
            f"overlapped it is predicted to take {1e6 * seconds:.0f} us, and as XLA's "
            f"GEMM and collective {1e6 * plain_s:.0f} us; `python -m jax_ub simulate` "
            "prints the rates, and `python -m jax_ub tune` measures it"
        )
        run, seconds = MethodChoice(Method.XLA), plain_s
    return Prediction(
        op=op,
        method=run.method.value,
        gemm_s=alone_s,
        wire_s=wire_s,
        library_gemm_s=library_gemm_s,
        collective_s=part.vendor_collective_s(xla_bytes),
        plain_s=plain_s,
        moved_bytes=plain_bytes if run.method is Method.XLA else moved_bytes,
        variant=run.kernel_options.variant.value,
        seconds=seconds,
        why_xla_is_faster=reason,
    )


def _engine_s(op, work, run, machine, library_gemm_s, wire_s, enqueue_s):
    """Returns the seconds of a call that the machine's engine runs."""
    if run.method is Method.DIRECT:
        # On a host, a GEMM reads the peers' memory in place, so it takes a launch but
        # no transfers. A collective without a GEMM takes its transfers. Both end with a
        # barrier. A wgrad takes only its GEMM.
        if op == "wgrad":
            return library_gemm_s
        barrier_s = machine.handshake_s if work.num_ranks > 1 else 0.0
        reading_s = machine.launch_s if op in PRODUCTS else wire_s
        return library_gemm_s + reading_s + barrier_s
    call = Replay(work, machine, run)
    # The GEMM of a product is in its schedule.
    other_s = 0.0 if op in PRODUCTS else library_gemm_s
    is_sequential = op == "wgrad" or machine.is_host
    seconds = other_s + call.end_s if is_sequential else max(other_s, call.end_s)
    return max(seconds, call.num_launches * enqueue_s)


def estimate_on_gpus(
    op: str,
    choice: MethodChoice,
    sizes: tuple[int, int, int, int],
    dtype,
    devices: Sequence[jax.Device],
) -> Prediction | None:
    """Predicts the time of a call on the GPUs for which it is lowered.

    Returns None if `devices` are no GPUs or the call is not modeled: it is empty, or
    its dtype has no GEMM rate. `sizes` are M, K, N and P of `estimate`.
    """
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    if min(sizes) < 1 or np.dtype(dtype).itemsize not in hardware.RATE_OF_ITEMSIZE:
        return None
    name = hardware.name_of_kind(devices[0].device_kind)
    machine = hardware.HARDWARE[name] if name else _UNKNOWN_GPU
    # XLA captures no calls of a process with several GPUs, so that its host enqueues
    # each launch.
    is_captured = len({device.process_index for device in devices}) == len(devices)
    enqueue_s = 0.0 if is_captured else _ENQUEUE_S
    return estimate(op, choice, *sizes, dtype, machine, enqueue_s=enqueue_s)


def _as_run(work, choice, machine) -> MethodChoice:
    """Returns the method and options with which the machine's engine runs a call."""
    method = choice.method.forward if work.op in PRODUCTS else choice.method
    is_all_reduce, options = work.op.endswith("all_reduce"), choice.kernel_options
    has_one_shot = is_all_reduce and method is Method.RING_EXCHANGE
    if options.variant is Variant.ONE_SHOT and not has_one_shot:  # it has no effect
        options = dataclasses.replace(options, variant=Variant.PLAIN)
    # The CUDA engine cannot read the peers' memory in place, so "direct" is "auto".
    is_auto = method in (Method.AUTO, Method.DIRECT)
    if machine.is_host:
        method = Method.DIRECT if is_auto else method
    elif work.op == "all_gather_matmul" and work.sent_itemsize != work.itemsize:
        method = Method.XLA  # GPUs multiply no FP8 by wide operands
    elif is_auto and work.num_ranks == 1:
        method = Method.XLA  # nothing to overlap: the call is lowered as a GEMM of XLA
    elif is_auto:
        method = auto_on_gpus(gathers=work.gathers)
        if is_all_reduce and work.one_shot_bytes <= ONE_SHOT_BYTES:
            options = dataclasses.replace(options, variant=Variant.ONE_SHOT)
    return dataclasses.replace(choice, method=method, kernel_options=options)
