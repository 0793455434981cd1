"""A column then a row linear, forward and backward: one MLP without its activation."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import jax_ub as ub
from jax_ub.bench import cases, dots, peers
from jax_ub.bench.cases import Case, Place
from jax_ub.bench.devices import AXIS, Ranks, Spec
from jax_ub.bench.dots import Dot
from jax_ub.bench.gemm_cases import own_gemm
from jax_ub.bench.peak import at_peak
from jax_ub.bench.timing import Contender, fastest
from jax_ub.bench.workloads import Shape

# x [M, K], w1 [K, N], w2 [N, K], dy [M, K] -> y and the gradients of x, w1, w2.
_IN = (Spec(AXIS), Spec(None, AXIS), Spec(AXIS), Spec(AXIS))
_OUT = (Spec(AXIS), Spec(AXIS), Spec(None, AXIS), Spec(AXIS))


def linear_pair(place: Place, shape: Shape) -> list[Case]:
    """Six GEMMs, two gathers and two reductions, of which each peer makes the best."""
    best_dots = _fastest_dots(place, shape)
    ways = [
        _contender(
            place,
            shape,
            cases.BEST,
            functools.partial(_collectives_pair, dots=best_dots, wide=wide),
            f"{_describe(best_dots)}; sums in {'float32' if wide else place.dtype}",
        )
        for wide in ((False, True) if place.dtype != "float32" else (False,))
    ]
    ways.append(
        _contender(place, shape, cases.BEST, peers.naive_pair, cases.AS_WRITTEN)
    )
    flops = 6 * shape.flops
    contenders = [
        _contender(place, shape, cases.OWN, _own_pair(place.method)),
        fastest(ways),
        _contender(place, shape, cases.NAIVE, peers.naive_pair),
        _contender(
            place, shape, cases.RING, functools.partial(_ring_pair, dots=best_dots)
        ),
        _plain_pair(place, shape),
        *cases.launches(place.ranks),
        cases.copy_limit(4 * shape.bytes(jnp.dtype(place.dtype).itemsize)),
        *at_peak(place.ranks, place.dtype, flops),
    ]
    case = Case(
        op="linear_pair",
        variant="",
        dtype=place.dtype,
        num_ranks=place.num_ranks,
        shape=shape,
        flops=flops,
        contenders=contenders,
    )
    return [case]


def _own_pair(method: str) -> Callable[..., tuple]:
    def forward(x, w1, w2):
        linear = functools.partial(ub.linear, axis_name=AXIS, method=method)
        y = linear(x, w1, parallel="column")
        return linear(y, w2, parallel="row")

    def program(x, w1, w2, dy):
        y, backward = jax.vjp(forward, x, w1, w2)
        return (y, *backward(dy))

    return program


def _collectives_pair(x, w1, w2, dy, *, dots: Mapping[str, Dot], wide: bool):
    """XLA's collectives around its best dots; x and dy are gathered once each."""
    dtype = x.dtype
    moved = jnp.float32 if wide else dtype
    rows = peers.gather(x)
    hidden = dots["column_nn"](rows, w1, dtype)
    y = peers.scatter(dots["row_nn"](hidden, w2, moved)).astype(dtype)
    d_rows = peers.gather(dy)
    d_hidden = dots["row_nt"](d_rows, w2, dtype)
    dw2 = dots["row_tn"](hidden, d_rows, dtype)
    dx = peers.scatter(dots["column_nt"](d_hidden, w1, moved)).astype(dtype)
    return y, dx, dots["column_tn"](rows, d_hidden, dtype), dw2


def _ring_pair(x, w1, w2, dy, *, dots: Mapping[str, Dot]):
    """The same with rings; what the wgrads read is gathered by one too."""
    dtype = x.dtype
    hidden = peers.ring_gather_dot(x, w1, dots["column_nn"])
    y = peers.ring_dot_scatter(hidden, w2, dots["row_nn"])
    d_hidden = peers.ring_gather_dot(dy, w2, dots["row_nt"])
    dw2 = dots["row_tn"](hidden, peers.ring_gather(dy), dtype)
    dx = peers.ring_dot_scatter(d_hidden, w1, dots["column_nt"])
    return y, dx, dots["column_tn"](peers.ring_gather(x), d_hidden, dtype), dw2


def _fastest_dots(place: Place, shape: Shape) -> dict[str, dots.Way]:
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


def _shapes(shape):
    x, w = (shape.M, shape.K), (shape.K, shape.N)
    return (x, w, w[::-1], x)


def _contender(place, shape, name, function, way=""):
    operands = place.arrays(_shapes(shape), _IN, place.ranks)
    program = place.ranks.program(function, _IN, _OUT)
    return Contender(name, program, operands, way=way)


def _plain_pair(place, shape):
    """The six GEMMs of the same total sizes in the same engine, on one device."""
    gemm = {layout: own_gemm(place.method, layout) for layout in dots.LAYOUTS}

    def program(x, w1, w2, dy):
        hidden = gemm["nn"](x, w1, None, None)
        y = gemm["nn"](hidden, w2, None, None)
        d_hidden = gemm["nt"](dy, w2, None, None)
        dw2 = gemm["tn"](hidden, dy, None, None)
        dx = gemm["nt"](d_hidden, w1, None, None)
        return y, dx, gemm["tn"](x, d_hidden, None, None), dw2

    specs = (Spec(),) * 4
    operands = place.arrays(_shapes(shape), specs, Ranks(1))
    return Contender(cases.PLAIN, Ranks(1).program(program, specs, specs), operands)
