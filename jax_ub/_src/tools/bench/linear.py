"""Builds the cases of tensor-parallel linear layers, in jax_ub and in XLA.

AG+GEMM is the column-parallel linear layer of an MLP: x [M, K] times w [K, N], in
global sizes. GEMM+RS and GEMM+AR are the row-parallel layer that follows it. The pair
of both layers is also timed with gradients, and its backward pass alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jax_ub as ub
from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.memory import memory_report
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Memory, Setup, Shape
from jax_ub._src.tools.bench.gemm import Gemm, own_gemm
from jax_ub._src.tools.bench.machine import AXIS, Ranks, Spec
from jax_ub._src.tools.bench.peers import Dot
from jax_ub._src.tools.bench.timing import Candidate, fastest

# A function of one device's operands, for use in `jax.shard_map`.
Program = Callable[..., Any]
Dots = Mapping[str, Dot]
_Size = tuple[int, int]

_ROWS, _COLUMNS = Spec(AXIS), Spec(None, AXIS)
# The shardings of the gradients of x [M, K], w1 [K, N] and w2 [N, K].
_GRADIENTS = (_ROWS, _COLUMNS, _ROWS)
# Shapes that two Zen 5 cores multiply in 0.8 ms (AVX512-BF16 for bf16, AVX512 for f32).
SMALL_SHAPES = {"bfloat16": Shape(512, 768, 768), "float32": Shape(512, 512, 512)}


@dataclasses.dataclass(frozen=True)
class LinearOp:
    """A benchmarked computation of one or two linear layers, in jax_ub and in XLA.

    `dots` maps the name of each GEMM, which ends with its layout, to XLA's fastest dot.

    Attributes:
        num_gemms: number of GEMMs, all of the same size.
        sizes: returns the global shapes of the operands.
        dot_sizes: returns the shapes of one rank's operands in each GEMM, by its name.
        own: returns jax_ub's program for a method.
        variants: returns XLA's programs from `dots` that reduce partial sums in a
            dtype, by a description.
        ring: XLA's program from ppermute rings; takes the keyword argument `dots`.
        plain: the GEMMs on one device; takes the keyword argument `gemm`, a mapping
            from layout to jax_ub's GEMM.
        copies: number of GEMMs whose operands and results are read and written once.
        is_row: whether the sizes are those of the row layer, which reduces y.
    """

    name: str
    num_gemms: int
    sizes: Callable[[Shape], tuple[_Size, ...]]
    dot_sizes: Callable[[Shape, int], Mapping[str, tuple[_Size, _Size]]]
    in_specs: tuple[Spec, ...]
    out_specs: Any
    own: Callable[[str], Program]
    variants: Callable[[Dots, str], Mapping[str, Program]]
    naive: Program
    ring: Program
    plain: Program
    copies: int = 1
    is_row: bool = False

    def shape(self, column: Shape) -> Shape:
        return column.row if self.is_row else column

    def best(self, dots: Dots, dtype: str) -> dict[str, Program]:
        """Returns all XLA programs among which the fastest is timed, by description."""
        found: dict[str, Program] = {}
        for moved in peers.sum_dtypes(dtype):
            found |= self.variants(dots, moved)
        return {**found, peers.NAIVE_VARIANT: self.naive}


def linear(op: LinearOp, setup: Setup, column: Shape) -> list[Case]:
    """Returns the benchmark case of one op, at the sizes of an MLP's column layer."""
    shape, ranks, dtype = op.shape(column), setup.ranks, setup.dtype
    operands = ranks.draw(dtype, op.sizes(shape), op.in_specs)

    def candidate(name: str, function: Program, variant: str = "") -> Candidate:
        program = ranks.program(function, op.in_specs, op.out_specs)
        return Candidate(name, program, operands, variant)

    dots = {
        name: setup.dots(name[-2:], dtype, left, right, ranks)
        for name, (left, right) in op.dot_sizes(shape, setup.num_ranks).items()
    }
    own = candidate(cases.OWN, op.own(setup.method))
    variants = op.best(dots, dtype).items()
    best = fastest([candidate(cases.BEST, run, text) for text, run in variants])
    candidates = [
        own,
        best,
        candidate(cases.NAIVE, op.naive),
        candidate(cases.RING, functools.partial(op.ring, dots=dots)),
        plain(op, setup.method, dtype, shape),
        *cases.launches(ranks),
        cases.copy_limit(op.copies * shape.bytes(dtype)),
    ]
    memory = _memory(op, shape, dtype, own, best) if op.num_gemms == 1 else None
    gemms = op.num_gemms
    return [setup.case(op.name, shape, candidates, num_gemms=gemms, memory=memory)]


def plain(op: LinearOp, method: str, dtype: str, shape: Shape) -> Candidate:
    """Returns a limit: jax_ub's GEMMs of the global sizes on a single device."""
    gemm = {layout: own_gemm(method, layout) for layout in peers.LAYOUTS}
    one, sizes = Ranks(1), op.sizes(shape)
    specs, out_specs = jax.tree.map(
        lambda _: Spec(),
        (op.in_specs, op.out_specs),
        is_leaf=lambda leaf: isinstance(leaf, Spec),
    )
    program = one.program(functools.partial(op.plain, gemm=gemm), specs, out_specs)
    return Candidate(cases.PLAIN, program, one.draw(dtype, sizes, specs))


def _memory(op, shape, dtype, own, best):
    avoided, avoided_bytes = "the gathered x [M, K]", shape.M * shape.K
    if op.is_row:
        avoided = "the partial sums [M, N] of each rank"
        avoided_bytes = shape.M * shape.N
    own_bytes, peer_bytes = cases.temp_bytes(own), cases.temp_bytes(best)
    # The slots are released first, because they keep the largest size of all earlier
    # cases.
    communicators.release_slots()
    own()
    itemsize = own.operands[0].dtype.itemsize
    return Memory(
        own_bytes,
        peer_bytes,
        avoided,
        avoided_bytes * itemsize,
        memory_report().held_bytes,
    )


def small(setup: Setup, shape: Shape) -> list[Case]:
    """Returns a benchmark case of about 1 ms for each op, to time call overheads.

    The sizes are in `SMALL_SHAPES`; `shape` is ignored.
    """
    return [
        dataclasses.replace(case, op="small", variant=case.op)
        for op in FORWARD_OPS.values()
        for case in linear(op, setup, SMALL_SHAPES[setup.dtype])
    ]


def _forward_op(
    name: str, public: Program, naive: Program, ring: Program, **reductions: Program
) -> LinearOp:
    """Returns the `LinearOp` of a forward pass: AG+GEMM, GEMM+RS or GEMM+AR.

    `reductions` maps descriptions to collectives that reduce the product. Without them,
    the op gathers x.
    """

    def dot_sizes(shape, num_ranks):
        if reductions:
            local_k = shape.K // num_ranks
            return {"nn": ((shape.M, local_k), (local_k, shape.N))}
        return {"nn": ((shape.M, shape.K), (shape.K, shape.N // num_ranks))}

    def variants(dots, moved):
        dot = dots["nn"]
        if not reductions:
            return {str(dot): lambda x, w: dot(peers.gather(x), w, x.dtype)}
        return {
            f"{dot}, {text} in {moved}": peers.reduced(collective, dot, moved)
            for text, collective in reductions.items()
        }

    return LinearOp(
        name=name,
        num_gemms=1,
        sizes=lambda shape: shape.operands,
        dot_sizes=dot_sizes,
        in_specs=(_COLUMNS, _ROWS) if reductions else (_ROWS, _COLUMNS),
        # The result of GEMM+AR is replicated: each rank has all rows. It is declared as
        # sharded by rows, because shard_map would otherwise check the replication.
        out_specs=_ROWS if reductions else _COLUMNS,
        own=lambda method: functools.partial(public, axis_name=AXIS, method=method),
        variants=variants,
        naive=naive,
        ring=lambda x, w, *, dots: ring(x, w, dots["nn"]),
        plain=lambda x, w, *, gemm: gemm["nn"](x, w, None, None),
        is_row=bool(reductions),
    )


def _own_pair(method: str) -> Program:
    def forward(x, w1, w2):
        layer = functools.partial(ub.linear, axis_name=AXIS, method=method)
        return layer(layer(x, w1, parallel="column"), w2, parallel="row")

    return _with_gradients(forward)


def _with_gradients(forward: Program) -> Program:
    def program(x, w1, w2, dy):
        y, backward = jax.vjp(forward, x, w1, w2)
        return (y, *backward(dy))

    return program


def _own_backward(method: str) -> Program:
    layer = functools.partial(ub.linear, axis_name=AXIS, method=method)
    column, row = (functools.partial(layer, parallel=p) for p in ("column", "row"))
    return _only_gradients(column, row)


def _only_gradients(column: Program, row: Program) -> Program:
    def program(x, w1, hidden, w2, dy):
        # jax.vjp also traces the forward calls. XLA removes them, because their results
        # are not used, so only the backward pass is timed.
        d_hidden, dw2 = jax.vjp(row, hidden, w2)[1](dy)
        return (*jax.vjp(column, x, w1)[1](d_hidden), dw2)

    return program


class _Collectives:
    """Linear layers from XLA's collectives and dots, for the XLA programs."""

    def __init__(self, dots: Dots, moved: str):
        self.dots, self._moved = dots, moved
        self._gathered: dict[int, jax.Array] = {}

    def gather(self, x: jax.Array) -> jax.Array:
        if id(x) not in self._gathered:
            self._gathered[id(x)] = peers.gather(x)
        return self._gathered[id(x)]

    def gather_dot(self, x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
        return dot(self.gather(x), w, x.dtype)

    def dot_scatter(self, x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
        return peers.reduced(peers.scatter, dot, self._moved)(x, w)


class _Rings:
    """Linear layers from rings of `lax.ppermute`, for the XLA programs."""

    gather = staticmethod(peers.ring_gather)
    gather_dot = staticmethod(peers.ring_gather_dot)
    dot_scatter = staticmethod(peers.ring_dot_scatter)

    def __init__(self, dots: Dots):
        self.dots = dots


class _OneDevice:
    """Linear layers on one device, with jax_ub's local GEMMs, for the limit."""

    def __init__(self, gemm: Mapping[str, Gemm]):
        self.dots = {
            f"{layer}_{layout}": lambda a, b, _, run=run: run(a, b, None, None)
            for layer in ("column", "row")
            for layout, run in gemm.items()
        }

    def gather(self, x):
        return x

    def gather_dot(self, x, w, dot):
        return dot(x, w, x.dtype)

    dot_scatter = gather_dot


def _pair(layers, x, w1, w2, dy):
    hidden = layers.gather_dot(x, w1, layers.dots["column_nn"])
    y = layers.dot_scatter(hidden, w2, layers.dots["row_nn"])
    return (y, *_backward(layers, x, w1, hidden, w2, dy))


def _backward(layers, x, w1, hidden, w2, dy):
    dots, dtype = layers.dots, x.dtype
    d_hidden = layers.gather_dot(dy, w2, dots["row_nt"])
    dw2 = dots["row_tn"](hidden, layers.gather(dy), dtype)
    dx = layers.dot_scatter(d_hidden, w1, dots["column_nt"])
    return dx, dots["column_tn"](layers.gather(x), d_hidden, dtype), dw2


def _pair_dot_sizes(shape, num_ranks):
    width = shape.N // num_ranks
    x, hidden = (shape.M, shape.K), (shape.M, width)
    w1, w2 = (shape.K, width), (width, shape.K)
    return {
        "column_nn": (x, w1),
        "column_nt": (hidden, w1),
        "column_tn": (x, hidden),
        "row_nn": (hidden, w2),
        "row_nt": (x, w2),
        "row_tn": (hidden, x),
    }


def _pair_sizes(shape):
    x, w = (shape.M, shape.K), (shape.K, shape.N)
    return x, w, w[::-1], x


def _backward_sizes(shape):
    x, w1, w2, dy = _pair_sizes(shape)
    return x, w1, (shape.M, shape.N), w2, dy


FORWARD_OPS: dict[str, LinearOp] = {
    op.name: op
    for op in (
        _forward_op(
            "all_gather_matmul",
            ub.all_gather_matmul,
            peers.naive_column,
            peers.ring_gather_dot,
        ),
        _forward_op(
            "matmul_reduce_scatter",
            ub.matmul_reduce_scatter,
            peers.naive_row,
            peers.ring_dot_scatter,
            psum_scatter=peers.scatter,
        ),
        _forward_op(
            "matmul_all_reduce",
            ub.matmul_all_reduce,
            peers.naive_all_reduce,
            peers.ring_dot_all_reduce,
            psum=peers.all_reduce,
            psum_scatter_and_all_gather=peers.scatter_and_gather,
        ),
    )
}


def _pair_op(name, program, sizes, in_specs, out_specs, **more) -> LinearOp:
    def variants(dots, moved):
        text = "; ".join(f"{name} {dot}" for name, dot in dots.items())
        run = lambda *args: program(_Collectives(dots, moved), *args)  # noqa: E731
        return {f"{text}; sums in {moved}": run}

    return LinearOp(
        name=name,
        sizes=sizes,
        dot_sizes=_pair_dot_sizes,
        in_specs=in_specs,
        out_specs=out_specs,
        variants=variants,
        ring=lambda *args, dots: program(_Rings(dots), *args),
        plain=lambda *args, gemm: program(_OneDevice(gemm), *args),
        copies=4,
        **more,
    )


# Forward and backward pass of both layers: six GEMMs, two all-gathers, two
# reduce-scatters.
PAIR = _pair_op(
    "linear_pair",
    _pair,
    _pair_sizes,
    (_ROWS, _COLUMNS, _ROWS, _ROWS),
    (_ROWS, *_GRADIENTS),
    num_gemms=6,
    own=_own_pair,
    naive=_with_gradients(
        lambda x, w1, w2: peers.naive_row(peers.naive_column(x, w1), w2)
    ),
)
# Backward pass of both layers: four GEMMs, two all-gathers and a reduce-scatter.
BACKWARD = _pair_op(
    "linear_backward",
    _backward,
    _backward_sizes,
    (_ROWS, _COLUMNS, _COLUMNS, _ROWS, _ROWS),
    _GRADIENTS,
    num_gemms=4,
    own=_own_backward,
    naive=_only_gradients(peers.naive_column, peers.naive_row),
)
LINEAR_OPS = {**FORWARD_OPS, PAIR.name: PAIR, BACKWARD.name: BACKWARD}
