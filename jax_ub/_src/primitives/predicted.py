"""Predicts the time of a call on the GPUs that it is lowered for."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_ub._src.methods import Method, Variant
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.cost import PRODUCTS
from jax_ub._src.prediction.estimate import OPS, Prediction, estimate
from jax_ub._src.primitives.mesh import Ranks

if TYPE_CHECKING:
    from jax_ub._src.primitives.call import Call

# The machine for which calls are predicted if the cost model does not know their GPUs.
_ASSUMED = "h100"
# How long a host takes to enqueue one launch. Measured on one H100: 154 to 254 us for
# calls of 19 to 36 launches (docs/gpu/2026-11-27).
_ENQUEUE_S = 7.5e-6


def on_gpus(call: "Call", operands: Sequence, ranks: Ranks) -> Prediction | None:
    """Returns the predicted time of a call; None without GPUs or if not modeled.

    XLA captures no calls of a process with several GPUs, so their hosts enqueue each
    launch.
    """
    devices = ranks.devices
    op, M, K, N = call.global_sizes(operands)
    dtype = operands[0].dtype
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    if op not in OPS or dtype.itemsize not in hardware.ITEMSIZES or min(M, K, N) < 1:
        return None
    name = hardware.name_of_kind(devices[0].device_kind) or _ASSUMED
    num_ranks = call.num_ranks if call.axis_name else 1
    found = estimate(op, call.method.value, M, K, N, num_ranks, dtype, name)
    in_process = collections.Counter(device.process_index for device in devices)
    if max(in_process.values()) > 1:
        enqueued_s = found.num_launches * _ENQUEUE_S
        found = dataclasses.replace(found, seconds=max(found.seconds, enqueued_s))
    return found


def why_xla_is_faster(
    call: "Call", found: Prediction | None, ranks: Ranks
) -> str | None:
    """Returns why XLA should run a call with method "auto"; None if it should not.

    Only a GEMM that overlaps its own communication is left to XLA. For other calls, the
    predictions differ only by the assumed efficiencies of the collectives.
    """
    if found is None or call.method is not Method.AUTO or found.op not in PRODUCTS:
        return None
    if found.variant == Variant.ONE_SHOT.value:
        return None
    is_known = hardware.name_of_kind(ranks.devices[0].device_kind) is not None
    if not is_known or found.seconds <= found.serial_s:
        return None
    overlapped_us, xla_us = (1e6 * s for s in (found.seconds, found.serial_s))
    return (
        f"overlapped it is predicted to take {overlapped_us:.0f} us, and as XLA's GEMM "
        f"and collective {xla_us:.0f} us (docs/simulate.md); `python -m jax_ub tune` "
        "measures it"
    )
