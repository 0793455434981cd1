"""Predicts the time of one call, and whether XLA is faster."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_ub._src import methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.prediction.replay import PRODUCTS, Workload, gemm_s, replay
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
# The machine that is assumed if the cost model does not know the GPUs of a call.
_ASSUMED = "h100"
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
    seconds: float = 0.0

    @property
    def ideal_s(self) -> float:
        return max(self.gemm_s, self.wire_s)

    @property
    def serial_s(self) -> float:
        return self.library_gemm_s + self.collective_s

    @property
    def why_xla_is_faster(self) -> str | None:
        """Returns the reason to leave a call on GPUs to XLA, or None.

        Only a GEMM that overlaps its own communication is left to XLA. For other calls,
        the predictions differ only by the assumed efficiencies of the collectives.
        """
        is_one_shot = self.variant == Variant.ONE_SHOT.value
        if self.op not in PRODUCTS or is_one_shot or self.seconds <= self.plain_s:
            return None
        return (
            f"overlapped it is predicted to take {1e6 * self.seconds:.0f} us, and as "
            f"XLA's GEMM and collective {1e6 * self.plain_s:.0f} us; `python -m jax_ub "
            "simulate` prints the rates, and `python -m jax_ub tune` measures it"
        )


def predict(*arguments, **options) -> float:
    """Predicts the seconds of one call; takes the same arguments as `estimate`."""
    return estimate(*arguments, **options).seconds


def estimate(  # noqa: PLR0913, the call and the machine
    op: str,
    method: str | Method | MethodChoice,
    M: int,
    K: int,
    N: int,
    P: int,
    dtype,
    hardware: str | machines.Hardware = "h200",
    gathered_dtype=None,
) -> Prediction:
    """Predicts the time of one call of jax_ub with the simulator's cost model.

    Args:
        op: name of the FFI target without "jax_ub$", such as "all_gather_matmul".
        method: a method, with its options if it is a `MethodChoice`; "auto" runs as on
            the machine, where it may be "xla", which is the library's GEMM and the
            vendor's collective one after the other, with sums in f32.
        M: number of tokens, summed over all ranks.
        K: global contracting size; for collectives, bulk ops and wgrad, the number of
            features of the communicated tensor.
        N: global number of output features; ignored for collectives.
        P: number of ranks.
        dtype: dtype of the operands.
        hardware: "a100", "h100", "h200", "b200", "cpu", or a `Hardware`.
        gathered_dtype: dtype in which an array is all-gathered, if it is not `dtype`,
            as with `wire_dtype="fp8"`.
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
    if not isinstance(method, MethodChoice):
        method = MethodChoice(methods.resolve("simulate", method, None))
    machine = machines.find(hardware)
    call = op, (M, K, N, P), dtype, machine, gathered_dtype
    found = _estimate(method, *call)
    is_auto_on_gpus = method.method is Method.AUTO and not machine.is_host
    if is_auto_on_gpus and found.why_xla_is_faster:
        return _estimate(MethodChoice(Method.XLA), *call)
    return found


def _estimate(choice, op, sizes, dtype, machine, gathered_dtype=None, enqueue_s=0.0):
    """Predicts a call as the engine runs it, even if "auto" would select XLA."""
    M, K, N, P = sizes
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
    if run.kernel_options.variant is Variant.ONE_SHOT:
        moved_bytes = work.one_shot_bytes
    found = Prediction(
        op=op,
        method=run.method.value,
        gemm_s=alone_s,
        wire_s=moved_bytes / part.wire_bytes_per_s,
        library_gemm_s=library_gemm_s,
        collective_s=part.vendor_collective_s(xla_bytes),
        plain_s=library_gemm_s + part.vendor_collective_s(plain_bytes),
        moved_bytes=plain_bytes if run.method is Method.XLA else moved_bytes,
        variant=run.kernel_options.variant.value,
    )
    seconds = _seconds(found, work, run, machine, enqueue_s)
    return dataclasses.replace(found, seconds=max(seconds, found.gemm_s))


def _seconds(found, work, run, machine, enqueue_s):
    """Returns the duration of a call whose parts take the times in `found`.

    A host needs `enqueue_s` for each launch on a GPU.
    """
    if run.method is Method.XLA:
        return found.plain_s
    if run.method is Method.DIRECT:
        # On a host, a GEMM reads the peers' memory in place, so it takes a launch but
        # no transfers. A collective without a GEMM takes its transfers. Both end with a
        # barrier. A wgrad takes only its GEMM.
        if found.op == "wgrad":
            return found.library_gemm_s
        barrier_s = machine.handshake_s if work.num_ranks > 1 else 0.0
        reading_s = machine.launch_s if found.op in PRODUCTS else found.wire_s
        return found.library_gemm_s + reading_s + barrier_s
    call = replay(work, machine, run)
    # The GEMM of a product is in its schedule.
    other_s = 0.0 if found.op in PRODUCTS else found.library_gemm_s
    is_sequential = found.op == "wgrad" or machine.is_host
    seconds = other_s + call.end_s if is_sequential else max(other_s, call.end_s)
    # A one-shot all-reduce sends and sums the data in a single kernel.
    is_one_shot = run.kernel_options.variant is Variant.ONE_SHOT
    num_launches = sum(not is_one_shot or span.kind != "put" for span in call.spans)
    return max(seconds, num_launches * enqueue_s)


def estimate_on_gpus(
    op: str,
    choice: MethodChoice,
    sizes: tuple[int, int, int, int],
    dtype,
    devices: Sequence[jax.Device],
) -> Prediction | None:
    """Predicts the time of an overlapped call on the GPUs for which it is lowered.

    Returns None if `devices` are no GPUs or the call is not modeled: it is empty, or
    its dtype has no GEMM rate. `sizes` are M, K, N and P of `estimate`.
    """
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    if min(sizes) < 1 or np.dtype(dtype).itemsize not in machines.ITEMSIZES:
        return None
    name = machines.name_of_kind(devices[0].device_kind)
    machine = machines.HARDWARE[name or _ASSUMED]
    # XLA captures no calls of a process with several GPUs, so that its host enqueues
    # each launch.
    is_captured = len({device.process_index for device in devices}) == len(devices)
    enqueue_s = 0.0 if is_captured else _ENQUEUE_S
    found = _estimate(choice, op, sizes, dtype, machine, enqueue_s=enqueue_s)
    # Unknown GPUs overlap every call.
    return found if name else dataclasses.replace(found, plain_s=math.inf)


def _as_run(work, choice, machine) -> MethodChoice:
    """Returns the method and options with which the machine's engine runs a call."""
    is_all_reduce, options = work.op.endswith("all_reduce"), choice.kernel_options
    if options.variant is Variant.ONE_SHOT and not is_all_reduce:  # it has no effect
        options = dataclasses.replace(options, variant=Variant.PLAIN)
    # The CUDA engine cannot read the peers' memory in place, so "direct" is "auto".
    method, is_auto = choice.method, choice.method in (Method.AUTO, Method.DIRECT)
    if machine.is_host:
        method = Method.DIRECT if is_auto else method
    elif work.op == "all_gather_matmul" and work.sent_itemsize != work.itemsize:
        method = Method.XLA  # GPUs multiply no FP8 by wide operands
    elif is_auto and work.num_ranks == 1:
        method = Method.XLA  # nothing to overlap: the call is lowered as a GEMM of XLA
    elif is_auto:
        method = methods.auto_on_gpus(gathers=work.gathers)
        if is_all_reduce and work.one_shot_bytes <= ONE_SHOT_BYTES:
            options = KernelOptions(variant=Variant.ONE_SHOT)
    method = method.forward if work.op in PRODUCTS else method
    return dataclasses.replace(choice, method=method, kernel_options=options)
