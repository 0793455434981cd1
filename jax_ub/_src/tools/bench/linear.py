"""Builds benchmark cases of tensor-parallel linear layers, in jax_ub and in XLA.

AG+GEMM is the column-parallel linear layer of an MLP: x [M, K] times w [K, N], in
global sizes. GEMM+RS and GEMM+AR are the row-parallel layer that follows it, x [M, N]
times w [N, K]. The pair of the two layers is timed with gradients. Latency is the time
of a call that sends almost no data.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

import jax_ub as ub
from jax_ub._src.fp8.recipes import INPUT, KERNEL, OUTPUT_GRAD, Recipe, has_one_scale
from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.memory import memory_report
from jax_ub._src.scaled_array import ScaledArray, source_of
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Memory, Setup
from jax_ub._src.tools.bench.peers import Collectives, DotVariant, Rings
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, COLUMNS, ROWS, Ranks, Spec, normal
from jax_ub._src.tools.programs import PALLAS, Programs, fastest_pallas
from jax_ub._src.tools.timing import Candidate

# A function of one device's operands, for use in `jax.shard_map`.
Program = Callable[..., Any]

# How each array is sharded, by its dimensions: "MK" is x or dy, "KN" the kernel of the
# column-parallel layer, "MN" the hidden features, "NK" the kernel of the row-parallel
# layer.
_SPECS = {"MK": ROWS, "KN": COLUMNS, "MN": COLUMNS, "NK": ROWS}
# Maps the name of a GEMM to the dimensions of its operands and its result. The name has
# the layer and the layout, such as "column_nn" or "row_nt". In the row-parallel layer,
# K and N are swapped.
_GEMMS = {
    f"{layer}_{layout}": tuple(dims.translate(swap) for dims in arrays)
    for layer, swap in (("column", {}), ("row", str.maketrans("KN", "NK")))
    for layout, arrays in peers.LAYOUTS.items()
}
# Shapes of GEMMs that take 0.8 ms on two Zen 5 cores (bf16 with AVX512-BF16, f32 with
# AVX512).
SMALL_SHAPES = {"bfloat16": Shape(512, 768, 768), "float32": Shape(512, 512, 512)}
# Size of the arrays in latency cases: a rank has 16 tokens with 16 features.
_WIDTH = 16
LATENCY_SHAPE = Shape(_WIDTH, _WIDTH, _WIDTH)
# Latency is measured with a chain of 1 + MORE_CALLS calls. The time of a single call is
# subtracted from the time of the chain, which cancels the time to dispatch a program.
MORE_CALLS = 100


@dataclasses.dataclass(frozen=True)
class LinearOp:
    """A benchmarked computation of one or two linear layers, in jax_ub and in XLA.

    Attributes:
        operands: dimensions of the operands, such as "MK".
        results: dimensions of the result; for several results, a tuple.
        gemms: the names of the GEMMs in `_GEMMS`, which are all of the same size.
        reductions: the collectives that may reduce partial sums.
        run: XLA's program, a function of (layers, *operands). `layers` is an object of
            class `Collectives`.
        own: returns jax_ub's program. Options are `method` (default: the value
            of `JAX_UB_METHOD`), the FP8 recipe `fp8` of the layers, and `hidden`, a
            function of the hidden features.
        naive: XLA's program as most users write it.
        roles: the role of each operand in FP8 quantization.
    """

    name: str
    operands: tuple[str, ...]
    results: str | tuple[str, ...]
    gemms: tuple[str, ...]
    reductions: tuple[str, ...]
    run: Program
    own: Callable[..., Program]
    naive: Program
    roles: tuple[str, ...] = (INPUT, KERNEL)

    def on(
        self, ranks: Ranks, dtype: str, column: Shape, recipe: Recipe | None = None
    ) -> Programs:
        """Draws random operands on `ranks`, and returns programs that call the op.

        With a recipe, the operands are quantized to FP8, except for gradients.
        """
        specs: Any = [_SPECS[dims] for dims in self.operands]
        operands: Any = ranks.draw(dtype, [*map(column.sizes, self.operands)], specs)
        if recipe is not None:
            quantize = functools.partial(_quantized_operand, ranks, recipe)
            pairs = map(quantize, operands, specs, self.roles)
            operands, specs = zip(*pairs, strict=True)
        return Programs(ranks, operands, specs, jax.tree.map(_SPECS.get, self.results))

    def on_layers(self, layers: Callable[[], Collectives]) -> Program:
        """Returns XLA's program. It calls `layers()` for new layers in each trace."""

        def program(*operands):
            made = layers()
            return self.run(made, *map(made.quantized, operands, self.roles))

        return program

    def in_xla(
        self, dots: dict[str, DotVariant], dtype: str, **fp8: Any
    ) -> dict[Any, Program]:
        """Returns {variant: XLA program}, for each way to reduce the partial sums.

        Partial sums have the dtype `dtype` in some of the programs and f32 in the
        others, because the fastest choice depends on the machine. `dots` has the GEMMs
        by name, `fp8` are options of `Collectives`.
        """
        variants = {
            (moved, reduction)
            for moved in (dtype, "float32")
            for reduction in self.reductions
        } or {(dtype, "")}
        layers = functools.partial(Collectives, dots, dtype, **fp8)
        return {
            variant: self.on_layers(functools.partial(layers, *variant))
            for variant in sorted(variants)
        }


def _quantized_operand(
    ranks: Ranks, recipe: Recipe, x: jax.Array, spec: Spec, role: str
) -> tuple[Any, Any]:
    """Quantizes a global array to FP8 and shards it; also returns partition specs.

    A gradient is returned as it is.
    """
    if role == OUTPUT_GRAD:
        return x, spec
    q = jax.jit(functools.partial(ub.quantize, recipe=recipe, role=role))(x)
    entries = (*spec, *[None] * (q.ndim - len(spec)))
    along = zip(entries, q.scales.shape, strict=True)
    scales = Spec(*(entry if size > 1 else None for entry, size in along))
    specs = ScaledArray.tree_unflatten(None, (spec, scales, spec))
    place = functools.partial(NamedSharding, ranks.mesh)
    return jax.device_put(q, jax.tree.map(place, specs)), specs


def linear(op: LinearOp, setup: Setup, column: Shape) -> list[Case]:
    """Returns the cases of an op. `column` has the sizes of the column-parallel layer.

    FP8 operands are quantized before the timed call. The pair of layers is also timed
    with `fp8=recipe`, which quantizes operands and gradients in the call.
    """
    has_recipe = op is PAIR and setup.dtype in cases.FP8_RECIPES
    choices = (False, True) if has_recipe else (False,)
    return [_case(op, setup, column, quantizes=each) for each in choices]


def small(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark case of each forward op, at sizes that take about 1 ms.

    The sizes are fixed, so `shape` is ignored.
    """
    return [
        dataclasses.replace(case, op="small", variant=case.op)
        for op in FORWARD_OPS.values()
        for case in linear(op, setup, SMALL_SHAPES[setup.dtype])
    ]


def _case(op, setup, column, *, quantizes):
    """Returns an op's benchmark case: jax_ub's program, XLA's programs and the limits.

    FP8 operands are quantized within the timed call if `quantizes`, else before it.
    """
    ranks, recipe = setup.ranks, cases.FP8_RECIPES.get(setup.dtype)
    is_pair, is_row = op is PAIR, op in (_ROW, _REDUCED)
    is_job = jax.process_count() > 1
    shape = column.row if is_row else column
    wide = cases.wide_dtype(setup.dtype)
    given = None if quantizes else recipe
    options: dict[str, Any] = {"fp8": recipe} if quantizes else {}
    if given is not None and is_pair:
        layers = Collectives({}, wide, wide, recipe=recipe)
        options["hidden"] = functools.partial(layers.quantized, role=INPUT)
    local = Shape(column.M, column.K, column.N // setup.ranks.num_ranks)
    dots = {
        name: peers.fastest_dot(
            name[-2:], wide, *map(local.sizes, _GEMMS[name][:2]), ranks
        )
        for name in op.gemms
    }
    programs = op.on(ranks, wide, column, given)
    own = programs(cases.OWN, op.own(**options))
    written = _written(op, setup.dtype, dots, quantizes)
    timed = [programs.fastest(name, written[name]) for name in written]
    alone = op.on(Ranks(1), wide, column, given)
    plain = alone(cases.PLAIN, op.own(method="direct", **options))
    candidates: list[Any] = [own, *timed, plain]
    if recipe is not None:
        candidates.append(op.on(ranks, wide, column)(cases.BF16, op.own()))
    if is_job:
        in_process = op.on(Ranks(setup.ranks.num_ranks), wide, column)
        candidates.append(in_process(cases.IN_PROCESS, op.own()))
    copied = shape.bytes(wide if recipe is None else jnp.float8_e4m3fn, wide)
    candidates.append(cases.copy_limit((4 if is_pair else 1) * copied))
    if op.name == "all_gather_matmul" and recipe is None and ranks.platform != "cpu":
        kernel = fastest_pallas(programs, shape, wide)
        text = f"{PALLAS}: {op.name} {shape} {wide} P={setup.ranks.num_ranks}: {kernel}"
        candidates.append(text if isinstance(kernel, str) else kernel[0])
    memory = None
    if not (is_pair or is_job):
        # The buffer that jax_ub avoids holds the gathered x of an all-gather + GEMM, or
        # each rank's partial sums.
        dtype = jnp.dtype(wide) if is_row else own.operands[0].dtype
        avoided_bytes = column.M * column.K * dtype.itemsize
        memory = _memory(setup, own, timed[-1], avoided_bytes)
    # If `quantizes`, XLA's programs quantize gradients to e5m2, which rounds more than
    # the e4m3 of operands.
    rounded = jnp.float8_e5m2 if quantizes else jnp.float8_e4m3fn
    quantizes_in_call = recipe is not None and is_pair
    return setup.case(
        op.name,
        shape,
        candidates,
        num_gemms=len(op.gemms),
        variant="fp8=recipe" if quantizes else "",
        memory=memory,
        fp8_rounding=float(jnp.finfo(rounded).eps) if quantizes_in_call else 0.0,
    )


def _written(op, dtype, dots, quantizes):
    """Returns {table column: {variant: XLA program}}, with XLA's best column last.

    `dots` has XLA's fastest dots by GEMM. `quantizes` is whether the programs also
    quantize gradients.
    """
    recipe, wide = cases.FP8_RECIPES.get(dtype), cases.wide_dtype(dtype)
    in_xla = functools.partial(op.in_xla, dots, wide)
    if recipe is None:
        return {
            cases.RING: {"": op.on_layers(functools.partial(Rings, dots, wide, wide))},
            cases.NAIVE: {"": op.naive},
            cases.BEST: {**in_xla(), "naive": op.naive},
        }
    fp8 = {
        "recipe": recipe,
        # XLA's FP8 dot cannot multiply by scales that change along K, so gradients are
        # quantized only by recipes with one scale per tensor.
        "quantizes_gradients": quantizes and has_one_scale(recipe),
    }
    found = {cases.XLA_QDQ: in_xla(dequantizes=True, **fp8)}
    if dtype == "mxfp8":  # XLA has no dot of FP8 values with a scale per block
        return found
    return {cases.XLA_F8: in_xla(**fp8), **found}


def _memory(setup, own, best, avoided_bytes):
    # The communication buffers of earlier cases are freed first, because they would
    # keep the size of the largest case.
    communicators.release_slots()
    own()
    residuals = jax.eval_shape(
        lambda *operands: jax.vjp(own.program, *operands)[1], *own.operands
    )
    sizes = (leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    return Memory(
        own_bytes=cases.temp_bytes(own),
        peer_bytes=cases.temp_bytes(best),
        avoided_bytes=avoided_bytes,
        workspace_bytes=memory_report().held_bytes,
        residual_bytes=sum(sizes) // setup.ranks.num_ranks,
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class Chain(Candidate):
    """Times a chain of calls, and derives the time of one call without its dispatch.

    The time is the difference to the program `once`, which makes one call, divided by
    MORE_CALLS.
    """

    once: Candidate

    def seconds(self) -> float:
        difference = super().seconds() - self.once.seconds()
        # Because of noise, a single call may take longer than the chain. A tiny
        # positive time then keeps ratios defined.
        return max(difference, 1e-9) / MORE_CALLS


def latency(setup: Setup, shape: Shape) -> list[Case]:
    """Returns a benchmark case for each op, which times calls on 256 elements per rank.

    The size is fixed, so `shape` is ignored. With one rank, the list is empty.
    """
    if setup.ranks.num_ranks == 1:
        return []
    ranks, dtype = setup.ranks, setup.dtype
    operands = [
        ranks.place(normal(0, (ranks.num_ranks * _WIDTH, _WIDTH), dtype), ROWS),
        ranks.place(normal(1, (_WIDTH, _WIDTH), dtype, 0.1 * _WIDTH**-0.5), Spec()),
    ]
    programs = Programs(ranks, operands, (ROWS, Spec()), ROWS)

    def chain(name, op, call):
        many, once = (
            programs(name, functools.partial(_chain, op, call, num_calls))
            for num_calls in (1 + MORE_CALLS, 1)
        )
        return Chain(**vars(many), once=once)

    calls: dict[str, tuple[Program, Program]] = {
        **{name: (op.own(), op.naive) for name, op in FORWARD_OPS.items()},
        "all_reduce": (
            lambda x, w: ub.all_reduce(x, axis_name=AXIS),
            lambda x, w: lax.psum(x, AXIS),
        ),
    }
    return [
        setup.case(
            *("latency", LATENCY_SHAPE),
            [chain(cases.OWN, op, own), chain(cases.BEST, op, xla)],
            num_gemms=0,
            variant=op,
        )
        for op, (own, xla) in calls.items()
    ]


def _chain(op, call, num_calls, x, w):
    # Each call depends on the result of the previous one, so that XLA neither runs
    # calls concurrently nor merges them. The scaled result is added to x, so that
    # values stay near x.
    w = lax.pcast(w, AXIS, to="varying")
    num_ranks, rows = lax.axis_size(AXIS), x.shape[0]
    y = x
    for _ in range(num_calls):
        result = call(y[: rows // num_ranks] if op == "all_gather_matmul" else y, w)
        if op in FORWARD_OPS:  # GEMM+RS returns fewer rows than x has
            result = jnp.tile(result, (rows // result.shape[0], 1))
        y = x + 0.5 / num_ranks * lax.convert_element_type(result, x.dtype)
    return y


def _pair(layers, x, w1, w2, dy):
    hidden = layers.quantized(layers.all_gather_matmul(x, w1), INPUT)
    y = layers.matmul_reduce_scatter(hidden, w2)
    d_hidden = layers.all_gather_matmul(dy, w2, "row_nt")
    dw2 = layers.dots["row_tn"](hidden, layers.gather(dy), layers.dtype)
    d_hidden = layers.quantized(d_hidden, OUTPUT_GRAD)
    dx = layers.matmul_reduce_scatter(d_hidden, w1, "column_nt")
    dw1 = layers.dots["column_tn"](layers.gather(x), d_hidden, layers.dtype)
    return y, dx, dw1, dw2


def _with_gradients(column: Program, row: Program) -> Program:
    def program(x, w1, w2, dy):
        y, backward = jax.vjp(lambda x, w1, w2: row(column(x, w1), w2), x, w1, w2)
        return (y, *map(source_of, backward(dy)))

    return program


def _own_pair(method=None, fp8=None, hidden=lambda x: x):
    layer = functools.partial(ub.linear, axis_name=AXIS, method=method, fp8=fp8)
    column, row = (functools.partial(layer, parallel=p) for p in ("column", "row"))
    return _with_gradients(column, lambda x, w: row(hidden(x), w))


def _forward_op(name: str, gemm: str, reductions: tuple[str, ...]) -> LinearOp:
    def run(layers, x, w):
        return getattr(layers, name)(x, w)

    def naive(x, w):  # a `lax` collective and `@`
        dots = {gemm: DotVariant("nn")}
        return run(Collectives(dots, x.dtype, x.dtype, "psum"), x, w)

    return LinearOp(
        name,
        operands=_GEMMS[gemm][:2],
        # The result of GEMM + all-reduce is replicated, with all rows on each rank. It
        # is declared as sharded by rows, because `jax.shard_map` would otherwise check
        # that it is replicated.
        results=_GEMMS[gemm][2],
        gemms=(gemm,),
        reductions=reductions,
        run=run,
        own=functools.partial(functools.partial, getattr(ub, name), axis_name=AXIS),
        naive=naive,
    )


_COLUMN = _forward_op("all_gather_matmul", "column_nn", ())
_ROW = _forward_op("matmul_reduce_scatter", "row_nn", ("psum_scatter",))
_REDUCED = _forward_op("matmul_all_reduce", "row_nn", ("psum_scatter", "psum"))
FORWARD_OPS = {op.name: op for op in (_COLUMN, _ROW, _REDUCED)}
# The column-parallel and the row-parallel layer of an MLP with their gradients: six
# GEMMs, two all-gathers and two reduce-scatters.
PAIR = LinearOp(
    name="linear_pair",
    operands=("MK", "KN", "NK", "MK"),
    results=("MK", "MK", "KN", "NK"),
    gemms=tuple(_GEMMS),
    reductions=("psum_scatter",),
    run=_pair,
    own=_own_pair,
    naive=_with_gradients(_COLUMN.naive, _ROW.naive),
    roles=(INPUT, KERNEL, KERNEL, OUTPUT_GRAD),
)
LINEAR_OPS = {**FORWARD_OPS, PAIR.name: PAIR}
