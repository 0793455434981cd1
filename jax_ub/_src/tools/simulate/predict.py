"""Predicts the time of one call with the simulator's cost model."""

import dataclasses

import numpy as np

from jax_ub._src import methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.methods import Method, Variant
from jax_ub._src.tools.simulate import hardware as machines
from jax_ub._src.tools.simulate import plan
from jax_ub._src.tools.simulate.bounds import bounds
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.tiles import library_seconds
from jax_ub._src.tools.simulate.workload import PRODUCTS, Workload

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Ops that run a local GEMM and a collective that does not depend on it. The value is
# the collective, which communicates the layer's x.
_COMPANIONS = {
    "bulk_all_gather": "all_gather",
    "bulk_reduce_scatter": "reduce_scatter",
    "wgrad": "all_gather",
}
# Methods with which the engine chooses the schedule, by whether the op has a GEMM.
_CHOOSING = {False: (Method.AUTO, Method.DIRECT), True: (Method.AUTO,)}
OPS = (*PRODUCTS, *_COLLECTIVES, *_COMPANIONS, "matmul")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted times of one call for one rank, in seconds, and the bytes it sends.

    Attributes:
        op: the op.
        method: the method; "auto" is resolved.
        knobs: options of the fastest schedule, such as "b4a1s2"; empty for "xla".
        seconds: time of the call.
        gemm_s: time of its GEMM alone, at the machine's full rate.
        wire_s: time of its transfers alone, at the wire's full bandwidth.
        serial_s: time of the library's GEMM followed by the vendor's collective.
        moved_bytes: bytes that each rank sends, and also receives.
        variant: variant of the schedule: "one_shot" if "auto" selects it for an
            all-reduce of few tokens on a GPU.
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

    @property
    def exposed_s(self) -> float:
        """Returns the predicted time of the call beyond the time of its GEMM."""
        return self.seconds - self.gemm_s


def predict(
    op: str,
    method: str,
    M: int,
    K: int,
    N: int,
    P: int,
    dtype,
    hardware: str | Hardware = "h200",
) -> float:
    """Predicts the seconds of one call of jax_ub with the simulator's cost model.

    Args:
        op: name of the FFI target without "jax_ub$", such as "all_gather_matmul".
        method: name of a method; "auto" selects the machine's best schedule, "xla" is
            the library's GEMM and the vendor's collective one after the other.
        M: number of tokens, summed over all ranks.
        K: global contracting size; for collectives, bulk ops and wgrad, the number of
            features of the communicated tensor.
        N: global number of output features; ignored for collectives.
        P: number of ranks.
        dtype: dtype of the operands.
        hardware: "a100", "h100", "h200", "b200", "cpu", or a `Hardware`.

    Raises:
        UnknownNameError: if op, method or hardware are not known.
        ShapeContractError: if a size or P is less than 1.
    """
    return estimate(op, method, M, K, N, P, dtype, hardware).seconds


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
    """Predicts one call as `predict` does, with the parts of its time and its bytes."""
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
    if op in _COMPANIONS or op == "matmul":
        return _beside(op, chosen, (M, K, N, P), itemsize, machine)
    width = K if op in PRODUCTS or op == "all_gather" else N
    work = _workload(op, (M, width, N if op in PRODUCTS else K, P), itemsize, machine)
    return _alone(work, chosen, machine)


def _workload(op, sizes, itemsize, machine):
    # A host keeps partial sums as f32 in its slots; a GPU rounds them before sending.
    with_product = op in PRODUCTS and op != "all_gather_matmul"
    partial = 4 if machine.is_host and with_product else itemsize
    M, K, N, P = sizes
    return Workload(op, M, K, N, P, itemsize, partial)


def _alone(work, method, machine):
    parts = bounds(work, machine)
    name, variant = _schedule_name(work, method, machine), None
    moved_bytes, wire_s = work.moved_bytes, parts.wire_s
    if method in _CHOOSING[work.has_product] and plan.in_one_exchange(work, machine):
        name, variant = Method.RING_EXCHANGE.value, Variant.ONE_SHOT
        moved_bytes = work.one_shot_bytes
        wire_s = moved_bytes / machine.wire_bytes_per_s
    if method is Method.XLA:
        knobs, seconds = "", parts.serial_s
    elif machine.is_host and name == "direct" and not work.has_product:
        knobs, seconds = "", parts.wire_s + machine.handshake_s
    else:
        found = plan.best(work, machine, name, variant)
        knobs, seconds = found.text, max(found.seconds, parts.gemm_s)
    return Prediction(
        op=work.op,
        method=name,
        knobs=knobs,
        seconds=seconds,
        gemm_s=parts.gemm_s,
        wire_s=wire_s,
        serial_s=parts.serial_s,
        moved_bytes=moved_bytes,
        variant=(variant or Variant.PLAIN).value,
    )


def _schedule_name(work, method, machine):
    name = method.value
    if method is Method.AUTO:
        name = plan.default_method(work.op, machine)
    if not work.has_product and name == "direct" and not machine.is_host:
        return Method.BULK.value
    if work.has_product and name == "bulk":
        return Method.RING_EXCHANGE.value  # "bulk" uses it in the forward pass
    return name


def _beside(op, method, sizes, itemsize, machine):
    """Predicts a local GEMM with a concurrent collective that does not depend on it."""
    M, K, N, P = sizes
    local = _workload("all_gather_matmul", sizes, itemsize, machine).gemm
    part = machine.shared_by(P)
    gemm_s = local.flops / part.flops_of(itemsize)
    library_s = library_seconds(part, local, itemsize)
    if op == "matmul" or P == 1:
        return Prediction(op, method.value, "", library_s, gemm_s, 0.0, library_s, 0.0)
    companion = _COMPANIONS[op]
    sent = _alone(
        _workload(companion, (M, K, K, P), itemsize, machine), method, machine
    )
    serial = library_s + sent.serial_s
    hidden = method is not Method.XLA and op != "wgrad" and not machine.is_host
    seconds = max(library_s, sent.seconds) if hidden else library_s + sent.seconds
    if machine.is_host and op == "wgrad" and method in (Method.AUTO, Method.DIRECT):
        # The GEMM reads the peers' operands in place, so there is no separate transfer.
        seconds = library_s
    return Prediction(
        op=op,
        method=sent.method,
        knobs=sent.knobs,
        seconds=serial if method is Method.XLA else seconds,
        gemm_s=gemm_s,
        wire_s=sent.wire_s,
        serial_s=serial,
        moved_bytes=sent.moved_bytes,
    )
