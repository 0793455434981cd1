"""Builds the benchmark cases of AG+GEMM, GEMM+RS and GEMM+AR in one process."""

import functools

import jax.numpy as jnp

from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.memory import memory_report
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Memory, Place
from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.forward_ops import ForwardOp, Program
from jax_ub._src.tools.bench.gemm_cases import plain_gemm
from jax_ub._src.tools.bench.peak import at_peak
from jax_ub._src.tools.bench.timing import Candidate, fastest
from jax_ub._src.tools.bench.workloads import Shape


def forward(op: ForwardOp, place: Place, column: Shape) -> list[Case]:
    """Returns the benchmark case of one forward op, with jax_ub's and XLA's programs.

    The sizes are those of an MLP whose column-parallel linear layer has the shape
    `column`. GEMM+RS and GEMM+AR use the row-parallel linear layer that follows it.
    """
    shape = op.shape(column)
    operands = place.ranks.draw(place.dtype, shape.operands, op.in_specs)

    def candidate(name: str, function: Program, way: str = "") -> Candidate:
        program = place.ranks.program(function, op.in_specs, op.out_spec)
        return Candidate(name, program, operands, way=way)

    left, right = op.local_shapes(shape, place.num_ranks)
    dot = place.dots("nn", place.dtype, left, right, place.ranks)
    own = candidate(cases.OWN, op.own(place.method))
    best = fastest(
        [
            candidate(cases.BEST, function, way)
            for way, function in op.ways(dot, place.dtype).items()
        ]
    )
    itemsize = jnp.dtype(place.dtype).itemsize
    return [
        Case(
            op=op.name,
            variant="",
            dtype=place.dtype,
            num_ranks=place.num_ranks,
            shape=shape,
            flops=shape.flops,
            candidates=[
                own,
                best,
                candidate(cases.NAIVE, op.naive),
                candidate(cases.RING, functools.partial(op.ring, dot=dot)),
                plain_gemm(Ranks(1), place.method, place.dtype, shape),
                *cases.launches(place.ranks),
                cases.copy_limit(shape.bytes(itemsize)),
                *at_peak(place.ranks, place.dtype, shape.flops),
            ],
            memory=_memory(op, shape, itemsize, own, best),
        )
    ]


def _memory(op, shape, itemsize, own, best):
    avoided, num_elements = "the gathered x [M, K]", shape.M * shape.K
    if op.reductions:
        avoided = "the partial sums [M, N] of each rank"
        num_elements = shape.M * shape.N
    return Memory(
        own_bytes=cases.temp_bytes(own),
        peer_bytes=cases.temp_bytes(best),
        avoided=avoided,
        avoided_bytes=num_elements * itemsize,
        workspace_bytes=_workspace_bytes(own),
    )


def _workspace_bytes(own):
    # Slots keep the largest size of all earlier cases, so release them first.
    communicators.release_slots()
    own()
    return memory_report().held_bytes
