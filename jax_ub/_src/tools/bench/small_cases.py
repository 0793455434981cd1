"""Benchmark cases of about 1 ms, where call overhead and thread wake-ups matter."""

import dataclasses

from jax_ub._src.tools.bench.cases import Case, Place
from jax_ub._src.tools.bench.collective_cases import forward
from jax_ub._src.tools.bench.forward_ops import FORWARD_OPS
from jax_ub._src.tools.bench.workloads import Shape

# Shapes that two Zen 5 cores multiply in 0.8 ms (AVX512-BF16 for bf16, AVX512 for f32).
SHAPES = {"bfloat16": Shape(512, 768, 768), "float32": Shape(512, 512, 512)}


def small(place: Place, shape: Shape) -> list[Case]:
    """Returns a case of about 1 ms for each forward op, at the sizes in `SHAPES`.

    The sizes are fixed, so `shape` is ignored.
    """
    return [
        dataclasses.replace(case, op="small", variant=case.op)
        for op in FORWARD_OPS.values()
        for case in forward(op, place, SHAPES[place.dtype])
    ]
