"""The forward ops in calls of about 1 ms, in which overhead and wake-ups count."""

import dataclasses

from jax_ub.bench.cases import Case, Place
from jax_ub.bench.collective_cases import forward
from jax_ub.bench.forward_ops import FORWARD_OPS
from jax_ub.bench.workloads import Shape

# Column linears that two cores of a Zen 5 multiply in 0.8 ms (AVX512-BF16, AVX512).
SHAPES = {"bfloat16": Shape(512, 768, 768), "float32": Shape(512, 512, 512)}


def small(place: Place, shape: Shape) -> list[Case]:
    """Each forward op at a size of its own, whatever `shape` is."""
    return [
        dataclasses.replace(case, op="small", variant=case.op)
        for op in FORWARD_OPS.values()
        for case in forward(op, place, SHAPES[place.dtype])
    ]
