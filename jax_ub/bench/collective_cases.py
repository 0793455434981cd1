"""AG+GEMM, GEMM+RS and GEMM+AR, forward."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jax_ub as ub
from jax_ub.bench import cases, peers
from jax_ub.bench.cases import Case, Memory, Place
from jax_ub.bench.devices import AXIS, Ranks, Spec
from jax_ub.bench.gemm_cases import own_gemm
from jax_ub.bench.peak import at_peak
from jax_ub.bench.timing import Contender, fastest
from jax_ub.bench.workloads import Shape
from jax_ub.runtime import communicators
from jax_ub.runtime.memory import memory_report

Program = Callable[[jax.Array, jax.Array], jax.Array]

_ROWS, _COLUMNS = Spec(AXIS, None), Spec(None, AXIS)


def all_gather_matmul(place: Place, shape: Shape) -> list[Case]:
    """The column linear of an MLP: x [M/P, K], w [K, N/P]."""
    local_w = (shape.K, shape.N // place.num_ranks)
    dot = place.dots("nn", place.dtype, (shape.M, shape.K), local_w, place.ranks)
    build = _Build(place, shape, (_ROWS, _COLUMNS), _COLUMNS)
    ways = [
        build.contender(
            cases.BEST, lambda x, w: dot(peers.gather(x), w, x.dtype), str(dot)
        ),
        build.contender(cases.BEST, peers.naive_column, cases.AS_WRITTEN),
    ]
    rings = [
        build.contender(cases.RING, functools.partial(peers.ring_gather_dot, dot=dot))
    ]
    gathered = shape.M * shape.K * jnp.dtype(place.dtype).itemsize
    return [
        build.case(
            "all_gather_matmul",
            build.own(ub.all_gather_matmul),
            [fastest(ways), build.contender(cases.NAIVE, peers.naive_column), *rings],
            ("the gathered x [M, K]", gathered),
        )
    ]


def matmul_reduce_scatter(place: Place, shape: Shape) -> list[Case]:
    """The row linear of the same MLP: x [M, N/P], w [N/P, K]."""
    reductions = {"psum_scatter": peers.scatter}
    return [
        _reduced_case(
            place,
            shape.row,
            "matmul_reduce_scatter",
            ub.matmul_reduce_scatter,
            reductions,
            (peers.naive_row, peers.ring_dot_scatter),
        )
    ]


def matmul_all_reduce(place: Place, shape: Shape) -> list[Case]:
    """The row linear without sequence parallelism: every rank gets all rows."""
    reductions = {
        "psum": peers.all_reduce,
        "psum_scatter and all_gather": peers.scatter_and_gather,
    }
    return [
        _reduced_case(
            place,
            shape.row,
            "matmul_all_reduce",
            ub.matmul_all_reduce,
            reductions,
            (peers.naive_all_reduce, peers.ring_dot_all_reduce),
        )
    ]


def _reduced_case(place, shape, op, function, reductions, others):
    left = (shape.M, shape.K // place.num_ranks)
    right = (shape.K // place.num_ranks, shape.N)
    dot = place.dots("nn", place.dtype, left, right, place.ranks)
    build = _Build(place, shape, (_COLUMNS, _ROWS), _ROWS)
    itemsize = jnp.dtype(place.dtype).itemsize
    naive, ring = others
    ways = [
        build.contender(
            cases.BEST,
            peers.reduced(collective, dot, wide),
            f"{dot}, {name} in {'float32' if wide else place.dtype}",
        )
        for name, collective in reductions.items()
        for wide in ((False, True) if itemsize < 4 else (False,))
    ]
    ways.append(build.contender(cases.BEST, naive, cases.AS_WRITTEN))
    contenders = [
        fastest(ways),
        build.contender(cases.NAIVE, naive),
        build.contender(cases.RING, functools.partial(ring, dot=dot)),
    ]
    partial = ("the partial sums [M, N] of each rank", shape.M * shape.N * itemsize)
    return build.case(op, build.own(function), contenders, partial)


class _Build:
    """Contenders and cases of one op (x, w) -> y."""

    def __init__(self, place: Place, shape: Shape, in_specs, out_spec):
        self.place, self.shape = place, shape
        self.in_specs, self.out_spec = in_specs, out_spec
        self.operands = place.arrays(_global_shapes(shape), in_specs, place.ranks)

    def contender(self, name: str, function: Program, way: str = "") -> Contender:
        """Jits a per-device function."""
        ranks = self.place.ranks
        program = ranks.program(function, self.in_specs, self.out_spec)
        return Contender(name, program, self.operands, way=way)

    def own(self, function: Callable[..., jax.Array]) -> Contender:
        """The public function, with the method under test."""
        bound = functools.partial(function, axis_name=AXIS, method=self.place.method)
        return self.contender(cases.OWN, bound)

    def case(
        self,
        op: str,
        own: Contender,
        others: Sequence[Contender],
        avoided: tuple[str, int],
    ) -> Case:
        """Adds the limits and what is allocated."""
        place, shape = self.place, self.shape
        memory = Memory(
            own_bytes=cases.temp_bytes(own),
            peer_bytes=cases.temp_bytes(others[0]),
            avoided=avoided[0],
            avoided_bytes=avoided[1],
            workspace_bytes=_workspace_bytes(own),
        )
        itemsize = jnp.dtype(place.dtype).itemsize
        limits = [
            plain_gemm(place, shape),
            *cases.launches(place.ranks),
            cases.copy_limit(shape.bytes(itemsize)),
            *at_peak(place.ranks, place.dtype, shape.flops),
        ]
        return Case(
            op=op,
            variant="",
            dtype=place.dtype,
            num_ranks=place.num_ranks,
            shape=shape,
            flops=shape.flops,
            contenders=[own, *others, *limits],
            memory=memory,
        )


def plain_gemm(place: Place, shape: Shape) -> Contender:
    """The GEMM of the same total size in the same engine, on one device."""
    one = Ranks(1)
    specs = (Spec(), Spec())
    operands = place.arrays(_global_shapes(shape), specs, one)
    nn = own_gemm(place.method, "nn")
    program = one.program(lambda x, w: nn(x, w, None, None), specs, Spec())
    return Contender(cases.PLAIN, program, operands)


def _global_shapes(shape):
    return ((shape.M, shape.K), (shape.K, shape.N))


def _workspace_bytes(own):
    communicators.release_slots()  # of the cases before, which this one would take
    own()
    return memory_report().held_bytes
