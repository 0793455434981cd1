"""Predicts the time of one call, and whether XLA is faster."""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jax_ub._src import methods
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.prediction.cost import (
    PRODUCTS,
    Bounds,
    Gemm,
    Workload,
    bounds,
)
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.prediction.replay import end_s, timeline
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Ops that run a local GEMM and a collective of an activation or a gradient of the same
# layer, concurrently where possible: {op: collective}. "matmul" communicates nothing.
_CONCURRENT = {
    "bulk_all_gather": "all_gather",
    "bulk_reduce_scatter": "reduce_scatter",
    "wgrad": "all_gather",
    "matmul": "all_gather",
}
OPS = (*PRODUCTS, *_COLLECTIVES, *_CONCURRENT)
# The machine for which calls are predicted if the cost model does not know their GPUs.
_ASSUMED = "h100"
# How long a host takes to enqueue one launch. Measured on one H100: 154 to 254 us for
# calls of 19 to 36 launches (docs/gpu/2026-11-27).
_ENQUEUE_S = 7.5e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(Bounds):
    """The predicted time of one call on one rank, and its parts, in seconds.

    Attributes:
        method: name of the method that the machine's engine runs.
        moved_bytes: bytes that each rank sends, and also receives.
        variant: "one_shot" if "auto" sums few tokens in one exchange on a GPU.
        num_launches: number of kernels and copies that a GPU launches; 0 without a
            schedule.
    """

    op: str
    method: str
    seconds: float
    moved_bytes: float
    variant: str = Variant.PLAIN.value
    num_launches: int = 0


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
    hardware: str | Hardware = "h200",
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
    if not _is_left_to_xla(found, method, machine):
        return found
    return _estimate(MethodChoice(Method.XLA), *call)


def _estimate(choice, op, sizes, dtype, machine, gathered_dtype=None):
    """Predicts a call that the engine runs, also if "auto" would leave it to XLA."""
    M, K, N, P = sizes
    itemsize = np.dtype(dtype).itemsize
    # CPUs exchange the partial sums of products in f32. GPUs round them to the dtype of
    # the operands before they send them, and those of FP8 products to 16 bits.
    is_f32 = machine.is_host and op in PRODUCTS
    gathered = None if gathered_dtype is None else np.dtype(gathered_dtype).itemsize
    itemsizes = itemsize, 4 if is_f32 else max(itemsize, 2), gathered
    if op in _CONCURRENT:
        work = Workload(_CONCURRENT[op], M, K, K, P, *itemsizes)
        return _estimate_concurrent(op, Gemm(M, N // P, K), work, choice, machine)
    work = Workload(op, M, K, N if op in PRODUCTS else K, P, *itemsizes)
    return _estimate_run(work, choice, machine)


def estimate_on_gpus(
    op: str,
    choice: MethodChoice,
    sizes: tuple[int, int, int, int],
    dtype,
    devices: Sequence[jax.Device],
) -> Prediction | None:
    """Predicts the time of an overlapped call on the GPUs for which it is lowered.

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
    found = _estimate(choice, op, sizes, dtype, machines.find(name))
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
    is_known = machines.name_of_kind(devices[0].device_kind) is not None
    if not is_known or not _is_slower_than_xla(found):
        return None
    overlapped_us, xla_us = (1e6 * s for s in (found.seconds, found.plain_s))
    return (
        f"overlapped it is predicted to take {overlapped_us:.0f} us, and as XLA's GEMM "
        f"and collective {xla_us:.0f} us; `python -m jax_ub simulate` prints the "
        "rates, and `python -m jax_ub tune` measures it"
    )


def _is_slower_than_xla(found):
    is_one_shot = found.variant == Variant.ONE_SHOT.value
    return found.op in PRODUCTS and not is_one_shot and found.seconds > found.plain_s


def _is_left_to_xla(found, choice, machine):
    """Returns whether "auto" on GPUs leaves the predicted call to XLA."""
    is_auto_on_gpus = choice.method is Method.AUTO and not machine.is_host
    return is_auto_on_gpus and _is_slower_than_xla(found)


def estimate_workload(
    work: Workload, choice: MethodChoice, machine: Hardware
) -> Prediction:
    """Predicts the time of `work` on a machine, where "auto" may leave it to XLA."""
    found = _estimate_run(work, choice, machine)
    if not _is_left_to_xla(found, choice, machine):
        return found
    return _estimate_run(work, MethodChoice(Method.XLA), machine)


def _estimate_run(work, choice, machine):
    parts, run = bounds(work, machine), _as_run(work, choice, machine)
    part, num_launches = machine.shared_by(work.num_ranks), 0
    moved_bytes, wire_s = work.moved_bytes, parts.wire_s
    is_one_shot = run.kernel_options.variant is Variant.ONE_SHOT
    if is_one_shot:
        moved_bytes = work.one_shot_bytes
        wire_s = moved_bytes / part.wire_bytes_per_s
    if run.method is Method.XLA:
        seconds = parts.plain_s
        moved_bytes = work.xla_bytes(is_host=machine.is_host, sums_in_f32=True)
    elif run.method is Method.DIRECT:
        # On a host, a GEMM reads the peers' memory in place, so it has no transfers. A
        # collective has only transfers. A barrier follows.
        seconds = (
            parts.library_gemm_s + machine.launch_s if work.has_product else wire_s
        )
        seconds += machine.handshake_s if work.num_ranks > 1 else 0.0
    else:
        spans = timeline(work, machine, run)
        seconds = end_s(spans)
        # In a one-shot all-reduce, the kernel that sums also puts the data.
        num_launches = sum(not is_one_shot or span.kind != "put" for span in spans)
    return Prediction(
        **{**vars(parts), "wire_s": wire_s},
        op=work.op,
        method=run.method.value,
        seconds=max(seconds, parts.gemm_s),
        moved_bytes=moved_bytes,
        variant=run.kernel_options.variant.value,
        num_launches=num_launches,
    )


def _as_run(work, choice, machine) -> MethodChoice:
    """Returns the method and options by which the machine's engine runs a call."""
    method = choice.method
    if not (machine.is_host or not work.has_product or work.multiplies_as_sent):
        method = Method.XLA  # GPUs multiply no FP8 by wide operands
    if method is Method.DIRECT and not machine.is_host:
        method = Method.AUTO  # the CUDA engine cannot read the peers' memory in place
    if method is not Method.AUTO:
        method = method.forward if work.has_product else method
    elif machine.is_host:
        method = Method.DIRECT
    elif work.num_ranks == 1:
        method = Method.XLA  # nothing to overlap: the call is lowered as a GEMM of XLA
    else:
        method = methods.auto_on_gpus(gathers=work.gathers)
        is_small = work.one_shot_bytes <= ONE_SHOT_BYTES
        if work.op.endswith("all_reduce") and is_small:
            options = KernelOptions(variant=Variant.ONE_SHOT)
            choice = dataclasses.replace(choice, kernel_options=options)
    return dataclasses.replace(choice, method=method)


def _estimate_concurrent(op, gemm, work, choice, machine):
    """Predicts a GEMM and the collective `work`, which do not depend on each other."""
    parts = bounds(work, machine, gemm)
    gemm_s = parts.library_gemm_s
    if op == "matmul" or work.num_ranks == 1:
        none = dict.fromkeys(("wire_s", "collective_s", "plain_collective_s"), 0.0)
        alone = {**vars(parts), **none}
        name = choice.method.value
        return Prediction(**alone, op=op, method=name, seconds=gemm_s, moved_bytes=0.0)
    sent = _estimate_run(work, choice, machine)
    seconds = gemm_s + sent.seconds
    if op == "wgrad" and sent.method == Method.DIRECT.value:
        seconds = gemm_s  # it reads the peers' operands in place
    elif op != "wgrad" and choice.method is not Method.XLA and not machine.is_host:
        seconds = max(gemm_s, sent.seconds)
    variant = Variant.PLAIN.value
    return dataclasses.replace(
        sent, **vars(parts), op=op, seconds=seconds, variant=variant
    )
