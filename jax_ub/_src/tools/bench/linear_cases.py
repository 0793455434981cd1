"""Builds the cases of an MLP's column- and row-parallel linears with gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import jax_ub as ub
from jax_ub._src.tools.bench import cases, dots, peers
from jax_ub._src.tools.bench.cases import Case, Place
from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec
from jax_ub._src.tools.bench.dots import Dot
from jax_ub._src.tools.bench.gemm_cases import own_gemm
from jax_ub._src.tools.bench.peak import at_peak
from jax_ub._src.tools.bench.timing import Candidate, fastest
from jax_ub._src.tools.bench.workloads import Shape

_ROWS, _COLUMNS = Spec(AXIS), Spec(None, AXIS)
# The gradients of x [M, K], w1 [K, N], w2 [N, K].
_GRADIENTS = (_ROWS, _COLUMNS, _ROWS)


@dataclasses.dataclass(frozen=True)
class _Op:
    """A computation of two linear layers, and the programs that compute it.

    Attributes:
        name: name on the command line.
        num_gemms: number of GEMMs, all of the same size.
        sizes: returns the global shapes of the operands.
        in_specs: shardings of the operands.
        out_specs: shardings of the results.
        own: returns jax_ub's program for a method.
        collectives: XLA's program from collectives and dots. Takes the keyword
            arguments `dots` and `moved`, the dtype of the reduced partial sums.
        naive: XLA's program as most users write it.
        ring: XLA's program from ppermute rings; takes the keyword argument `dots`.
        plain: the GEMMs on one device; takes the keyword argument `gemm`, a mapping
            from layout to jax_ub's GEMM.
    """

    name: str
    num_gemms: int
    sizes: Callable[[Shape], tuple[tuple[int, int], ...]]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    own: Callable[[str], Callable[..., tuple]]
    collectives: Callable[..., tuple]
    naive: Callable[..., tuple]
    ring: Callable[..., tuple]
    plain: Callable[..., tuple]


def linear_pair(place: Place, shape: Shape) -> list[Case]:
    """Returns the case of a column and a row linear layer, forward and backward.

    Together they run six GEMMs, two all-gathers and two reduce-scatters.
    """
    return [_case(_PAIR, place, shape)]


def linear_backward(place: Place, shape: Shape) -> list[Case]:
    """Returns the case of only the backward pass of a column and a row linear layer.

    It runs four GEMMs, two all-gathers and a reduce-scatter.
    """
    return [_case(_BACKWARD, place, shape)]


def _case(op: _Op, place: Place, shape: Shape) -> Case:
    operands = place.ranks.draw(place.dtype, op.sizes(shape), op.in_specs)

    def candidate(name: str, function: Callable[..., tuple], way: str = ""):
        program = place.ranks.program(function, op.in_specs, op.out_specs)
        return Candidate(name, program, operands, way=way)

    best_dots = _fastest_dots(place, shape)
    ways = [
        candidate(
            cases.BEST,
            functools.partial(op.collectives, dots=best_dots, moved=moved),
            f"{_describe(best_dots)}; sums in {moved}",
        )
        for moved in peers.sum_dtypes(place.dtype)
    ]
    ways.append(candidate(cases.BEST, op.naive, cases.AS_WRITTEN))
    flops = op.num_gemms * shape.flops
    num_bytes = shape.bytes(jnp.dtype(place.dtype).itemsize)
    return Case(
        op=op.name,
        variant="",
        dtype=place.dtype,
        num_ranks=place.num_ranks,
        shape=shape,
        flops=flops,
        candidates=[
            candidate(cases.OWN, op.own(place.method)),
            fastest(ways),
            candidate(cases.NAIVE, op.naive),
            candidate(cases.RING, functools.partial(op.ring, dots=best_dots)),
            _plain(op, place, shape),
            *cases.launches(place.ranks),
            cases.copy_limit(4 * num_bytes),
            *at_peak(place.ranks, place.dtype, flops),
        ],
    )


def _plain(op, place, shape):
    """Returns a program to compare with: jax_ub's GEMMs of the global sizes.

    They run on one device, so they need no communication.
    """
    gemm = {layout: own_gemm(place.method, layout) for layout in dots.LAYOUTS}
    in_specs, out_specs = ((Spec(),) * len(s) for s in (op.in_specs, op.out_specs))
    operands = Ranks(1).draw(place.dtype, op.sizes(shape), in_specs)
    program = functools.partial(op.plain, gemm=gemm)
    return Candidate(
        cases.PLAIN, Ranks(1).program(program, in_specs, out_specs), operands
    )


def _own_pair(method: str) -> Callable[..., tuple]:
    def forward(x, w1, w2):
        linear = functools.partial(ub.linear, axis_name=AXIS, method=method)
        y = linear(x, w1, parallel="column")
        return linear(y, w2, parallel="row")

    def program(x, w1, w2, dy):
        y, backward = jax.vjp(forward, x, w1, w2)
        return (y, *backward(dy))

    return program


def _own_backward(method: str) -> Callable[..., tuple]:
    linear = functools.partial(ub.linear, axis_name=AXIS, method=method)
    column, row = (functools.partial(linear, parallel=p) for p in ("column", "row"))

    def program(x, w1, hidden, w2, dy):
        # jax.vjp also traces the forward calls. XLA removes them, because their results
        # are not used, so only the backward pass is timed.
        d_hidden, dw2 = jax.vjp(row, hidden, w2)[1](dy)
        return (*jax.vjp(column, x, w1)[1](d_hidden), dw2)

    return program


def _collectives_pair(x, w1, w2, dy, *, dots: Mapping[str, Dot], moved: str):
    """Computes forward and backward passes with XLA's collectives and fastest dots.

    x and dy are gathered once each and reused in the wgrads.
    """
    dtype = x.dtype
    rows = peers.gather(x)
    hidden = dots["column_nn"](rows, w1, dtype)
    y = peers.scatter(dots["row_nn"](hidden, w2, moved)).astype(dtype)
    return (y, *_collectives_gradients(rows, w1, hidden, w2, dy, dots, moved))


def _collectives_backward(x, w1, hidden, w2, dy, *, dots, moved):
    rows = peers.gather(x)
    return _collectives_gradients(rows, w1, hidden, w2, dy, dots, moved)


def _collectives_gradients(rows, w1, hidden, w2, dy, dots, moved):
    dtype = dy.dtype
    d_rows = peers.gather(dy)
    d_hidden = dots["row_nt"](d_rows, w2, dtype)
    dw2 = dots["row_tn"](hidden, d_rows, dtype)
    dx = peers.scatter(dots["column_nt"](d_hidden, w1, moved)).astype(dtype)
    return dx, dots["column_tn"](rows, d_hidden, dtype), dw2


def _ring_pair(x, w1, w2, dy, *, dots: Mapping[str, Dot]):
    """Computes forward and backward passes with rings of ppermutes.

    The operands of the wgrads are gathered by rings, too.
    """
    hidden = peers.ring_gather_dot(x, w1, dots["column_nn"])
    y = peers.ring_dot_scatter(hidden, w2, dots["row_nn"])
    return (y, *_ring_backward(x, w1, hidden, w2, dy, dots=dots))


def _ring_backward(x, w1, hidden, w2, dy, *, dots):
    dtype = x.dtype
    d_hidden = peers.ring_gather_dot(dy, w2, dots["row_nt"])
    dw2 = dots["row_tn"](hidden, peers.ring_gather(dy), dtype)
    dx = peers.ring_dot_scatter(d_hidden, w1, dots["column_nt"])
    return dx, dots["column_tn"](peers.ring_gather(x), d_hidden, dtype), dw2


def _plain_pair(x, w1, w2, dy, *, gemm):
    hidden = gemm["nn"](x, w1, None, None)
    y = gemm["nn"](hidden, w2, None, None)
    return (y, *_plain_backward(x, w1, hidden, w2, dy, gemm=gemm))


def _plain_backward(x, w1, hidden, w2, dy, *, gemm):
    d_hidden = gemm["nt"](dy, w2, None, None)
    dw2 = gemm["tn"](hidden, dy, None, None)
    dx = gemm["nt"](d_hidden, w1, None, None)
    return dx, gemm["tn"](x, d_hidden, None, None), dw2


def _fastest_dots(place: Place, shape: Shape) -> dict[str, dots.DotVariant]:
    width = shape.N // place.num_ranks
    x, hidden = (shape.M, shape.K), (shape.M, width)
    w1, w2 = (shape.K, width), (width, shape.K)
    operands = {
        "column_nn": (x, w1),
        "column_nt": (hidden, w1),
        "column_tn": (x, hidden),
        "row_nn": (hidden, w2),
        "row_nt": (x, w2),
        "row_tn": (hidden, x),
    }
    return {
        name: place.dots(name[-2:], place.dtype, left, right, place.ranks)
        for name, (left, right) in operands.items()
    }


def _describe(found):
    return "; ".join(f"{name} {way}" for name, way in found.items())


def _pair_sizes(shape):
    x, w = (shape.M, shape.K), (shape.K, shape.N)
    return x, w, w[::-1], x


def _backward_sizes(shape):
    x, w1, w2, dy = _pair_sizes(shape)
    return x, w1, (shape.M, shape.N), w2, dy


_PAIR = _Op(
    name="linear_pair",
    num_gemms=6,
    sizes=_pair_sizes,
    in_specs=(_ROWS, _COLUMNS, _ROWS, _ROWS),
    out_specs=(_ROWS, *_GRADIENTS),
    own=_own_pair,
    collectives=_collectives_pair,
    naive=peers.naive_pair,
    ring=_ring_pair,
    plain=_plain_pair,
)
_BACKWARD = _Op(
    name="linear_backward",
    num_gemms=4,
    sizes=_backward_sizes,
    in_specs=(_ROWS, _COLUMNS, _COLUMNS, _ROWS, _ROWS),
    out_specs=_GRADIENTS,
    own=_own_backward,
    collectives=_collectives_backward,
    naive=peers.naive_backward,
    ring=_ring_backward,
    plain=_plain_backward,
)
