"""Builds benchmark cases of tensor-parallel linear layers, in jax_ub and in XLA.

AG+GEMM is the column-parallel linear layer of an MLP: x [M, K] times w [K, N], in
global sizes. GEMM+RS and GEMM+AR are the row-parallel layer that follows it, x [M, N]
times w [N, K]. The pair of the two layers is timed with gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import jax_ub as ub
from jax_ub._src.fp8.recipes import INPUT, KERNEL, OUTPUT_GRAD, Recipe, has_one_scale
from jax_ub._src.methods import PallasTiles
from jax_ub._src.primitives import pallas
from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.memory import memory_report
from jax_ub._src.scaled_array import ScaledArray, source_of
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import WIDE, Case, Memory, Setup
from jax_ub._src.tools.bench.peers import Dot, DotVariant
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, COLUMNS, ROWS, Ranks, Spec
from jax_ub._src.tools.timing import Candidate, fastest

# A function of one device's operands, for use in `jax.shard_map`.
Program = Callable[..., Any]
Dots = Mapping[str, Dot]

# The sharding of each array, by its dimensions: "MK" is x or dy, "KN" the kernel of the
# column layer, "MN" the hidden features, "NK" the kernel of the row layer.
_SPECS = {"MK": ROWS, "KN": COLUMNS, "MN": COLUMNS, "NK": ROWS}
# Dimensions of the operands and the result of each GEMM, by its name: the layer and the
# layout, such as "column_nn" or "row_nt". The row layer has K and N swapped.
_GEMMS = {
    f"{layer}_{layout}": tuple(dims.translate(swap) for dims in arrays)
    for layer, swap in (("column", {}), ("row", str.maketrans("KN", "NK")))
    for layout, arrays in peers.LAYOUTS.items()
}
# Shapes that two Zen 5 cores multiply in 0.8 ms (AVX512-BF16 for bf16, AVX512 for f32).
SMALL_SHAPES = {"bfloat16": Shape(512, 768, 768), "float32": Shape(512, 512, 512)}


@dataclasses.dataclass(frozen=True)
class LinearOp:
    """A benchmarked computation of one or two linear layers, in jax_ub and in XLA.

    Attributes:
        operands: dimensions of the operands, such as "MK".
        results: dimensions of the results.
        gemms: the names of the GEMMs in `_GEMMS`, which are all of the same size.
        programs: XLA's programs, functions of (layers, dots, *operands): an object such
            as `peers.Collectives`, and the dots of `gemms` by name. The key is the
            collective that reduces partial sums, or "" if there is none. With
            `peers.Rings`, only the first program is timed.
        own: returns jax_ub's program for a method; options are the FP8 recipe `fp8` of
            the layers, and `hidden`, a function of the hidden features.
        naive: XLA's program as most users write it.
    """

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    gemms: tuple[str, ...]
    programs: Mapping[str, Program]
    own: Callable[..., Program]
    naive: Program

    @property
    def is_row(self) -> bool:
        """Returns whether the op is the row-parallel layer, x [M, N] times w [N, K]."""
        return self.operands[0] == "MN"

    @property
    def is_pair(self) -> bool:
        """Returns whether the op is a column- and a row-parallel layer with gradients.

        Otherwise it is the forward pass of one layer.
        """
        return len(self.gemms) > 1

    @property
    def roles(self) -> list[str | None]:
        """Returns each operand's role in FP8 quantization; None if it is not quantized.

        A role is `INPUT` or `KERNEL`. The gradient of the result, which is the last
        operand of an op with gradients, is not quantized.
        """
        roles = [KERNEL if dims in ("KN", "NK") else INPUT for dims in self.operands]
        return [*roles[:-1], None] if self.is_pair else [*roles]

    def shape(self, column: Shape) -> Shape:
        return column.row if self.is_row else column

    def candidate_factory(
        self, ranks: Ranks, dtype: str, column: Shape, recipe: Recipe | None = None
    ) -> Callable[..., Candidate]:
        """Returns a function that makes programs to time with shared random operands.

        It takes the name of a `Candidate`, a function of one device's operands, and a
        description of it. With a recipe, the operands are quantized to FP8.
        """
        in_specs: Any = tuple(_SPECS[dims] for dims in self.operands)
        out_specs = tuple(_SPECS[dims] for dims in self.results)
        operands: Any = ranks.draw(dtype, [*map(column.sizes, self.operands)], in_specs)
        if recipe is not None:
            quantize = functools.partial(_quantized_operand, ranks, recipe)
            pairs = map(quantize, operands, in_specs, self.roles)
            operands, in_specs = zip(*pairs, strict=True)

        def candidate(name: str, function: Program, variant: str = "") -> Candidate:
            results = out_specs if len(out_specs) > 1 else out_specs[0]
            program = ranks.program(function, in_specs, results)
            return Candidate(name, program, operands, variant)

        return candidate

    def local_operands(self, column: Shape, num_ranks: int) -> dict[str, list[Any]]:
        """Returns {GEMM name: shapes of its two operands on one rank}."""
        local = Shape(column.M, column.K, column.N // num_ranks)
        return {name: [*map(local.sizes, _GEMMS[name][:2])] for name in self.gemms}

    def in_xla(self, dots: Dots, dtype: str) -> dict[str, Program]:
        """Returns {description: XLA program} for the op, the naive one included."""
        found = self.with_layers(peers.Collectives, dots, dtype)
        return {**found, peers.NAIVE_VARIANT: self.naive}

    def with_layers(
        self, layers: Callable[[str], peers.Collectives], dots: Dots, dtype: str
    ) -> dict[str, Program]:
        """Returns {description: XLA program}, one for each way to reduce partial sums.

        `layers` creates the object that runs the collectives, such as a
        `peers.Collectives`, from the dtype of partial sums. This dtype is `dtype` in
        some of the programs and f32 in the others, because the fastest choice depends
        on the machine. `dots` has the GEMMs by name.
        """

        def program(run: Program, moved: str) -> Program:
            def on_layers(*operands):
                found = layers(moved)
                pairs = zip(operands, self.roles, strict=True)
                return run(found, dots, *(found.quantized(*pair) for pair in pairs))

            return on_layers

        text = "; ".join(f"{name} {dot}" for name, dot in dots.items())
        found = {}
        for moved in (dtype, "float32"):
            for collective, run in self.programs.items():
                reduced = f"; {collective} in {moved}" if collective else ""
                found[f"{text}{reduced}"] = program(run, moved)
        return found

    def in_ring(self, dots: Dots) -> Program:
        run = next(iter(self.programs.values()))
        return functools.partial(run, peers.Rings(), dots)


def _quantized_operand(
    ranks: Ranks, recipe: Recipe, x: jax.Array, spec: Spec, role: str | None
) -> tuple[Any, Any]:
    """Quantizes a global array to FP8; returns it, sharded, and its partition specs.

    `role` says whether it is, for example, an activation or a kernel. With a role of
    None, the array is returned as it is.
    """
    if role is None:
        return x, spec
    q = jax.jit(functools.partial(ub.quantize, recipe=recipe, role=role))(x)
    entries = (*spec, *[None] * (q.ndim - len(spec)))
    along = zip(entries, q.scales.shape, strict=True)
    scales = Spec(*(entry if size > 1 else None for entry, size in along))
    specs = ScaledArray.tree_unflatten(None, (spec, scales, spec))
    place = functools.partial(NamedSharding, ranks.mesh)
    return jax.device_put(q, jax.tree.map(place, specs)), specs


def linear(op: LinearOp, setup: Setup, column: Shape) -> list[Case]:
    """Returns an op's cases; `column` has the sizes of an MLP's column-parallel layer.

    FP8 operands are quantized before the timed call. The pair of layers is also timed
    with `fp8=recipe`, which quantizes operands and gradients in the call.
    """
    found = [_case(op, setup, column, quantizes=False)]
    if setup.recipe is not None and op is PAIR:
        found.append(_case(op, setup, column, quantizes=True))
    return found


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
    """Returns an op's benchmark case: jax_ub's program, those of XLA, and the limits.

    FP8 operands are quantized within the timed call if `quantizes`, else before it.
    """
    shape, ranks, recipe = op.shape(column), setup.ranks, setup.recipe
    wide = cases.wide_dtype(setup.dtype)
    options = {"fp8": recipe} if quantizes else {}
    if recipe is not None and op.is_pair and not quantizes:
        options["hidden"] = functools.partial(peers.quantized, recipe, role=INPUT)
    candidate, alone = (
        op.candidate_factory(each, wide, column, None if quantizes else recipe)
        for each in (ranks, Ranks(1))
    )
    dots = {
        name: setup.dots(name[-2:], wide, *operands, ranks)
        for name, operands in op.local_operands(column, setup.num_ranks).items()
    }
    own = candidate(cases.OWN, op.own(setup.method, **options))
    notes: tuple[str, ...] = ()
    fp8_rounding = 0.0
    if recipe is None:
        best = fastest_of(candidate, cases.BEST, op.in_xla(dots, wide))
        naive = candidate(cases.NAIVE, op.naive)
        compared = [naive, candidate(cases.RING, op.in_ring(dots)), best]
        if op.name == "all_gather_matmul" and ranks.platform != "cpu":
            kernel = fastest_pallas(candidate, shape, wide, ranks)
            if isinstance(kernel, str):
                text = f"{op.name} {shape} {wide} P={setup.num_ranks}"
                notes = (f"{cases.PALLAS}: {text}: {kernel}",)
            else:
                compared.insert(0, kernel[0])
    else:
        in_bf16 = op.candidate_factory(ranks, wide, column)
        found = _in_xla_fp8(op, setup, dots, quantizes)
        compared = [
            in_bf16(cases.BF16, op.own(setup.method)),
            *(fastest_of(candidate, name, found[name]) for name in found),
        ]
        if op.is_pair:
            dtype = jnp.float8_e5m2 if quantizes else jnp.float8_e4m3fn
            fp8_rounding = float(jnp.finfo(dtype).eps)
    copied = shape.bytes(wide if recipe is None else jnp.float8_e4m3fn, wide)
    limits = [
        alone(cases.PLAIN, op.own("direct", **options)),
        cases.copy_limit((4 if op.is_pair else 1) * copied),
    ]
    return setup.case(
        op.name,
        shape,
        [own, *compared, *limits],
        num_gemms=len(op.gemms),
        variant="fp8=recipe" if quantizes else "",
        memory=None if op.is_pair else _memory(op, shape, own, compared[-1], ranks),
        notes=notes,
        fp8_rounding=fp8_rounding,
    )


def fastest_of(
    candidate: Callable[..., Candidate],
    name: str,
    programs: Mapping[str, Program],
    *how: Any,
) -> Candidate:
    """Times programs, {description: program}; returns the fastest, named `name`."""
    return fastest([candidate(name, run, text) for text, run in programs.items()], *how)


def pallas_programs(
    shape: Shape, dtype: str, ranks: Ranks
) -> dict[PallasTiles, Callable[..., jax.Array]] | str:
    """Returns {tile sizes: AG+GEMM with JAX's Pallas kernel} for all tiles that fit.

    If the kernel cannot run on these devices or at this size, returns the reason.
    """
    sizes = shape.M, shape.K, shape.N
    reason = pallas.why_not(ranks.devices, dtype, *sizes)
    if reason is not None:
        return reason
    return {
        tiles: functools.partial(pallas.all_gather_matmul, axis_name=AXIS, tiles=tiles)
        for tiles in pallas.tiles_for(*sizes, ranks.num_ranks)
    }


def fastest_pallas(
    candidate: Callable[..., Candidate], shape: Shape, dtype: str, ranks: Ranks
) -> tuple[Candidate, PallasTiles] | str:
    """Returns JAX's Pallas AG+GEMM and its fastest tiles, or why there is none."""
    found: Any = pallas_programs(shape, dtype, ranks)
    if isinstance(found, str):
        return found
    tiles = {str(tiles): tiles for tiles in found}
    try:
        best = fastest(
            [candidate(cases.PALLAS, run, str(each)) for each, run in found.items()]
        )
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return f"it failed: {str(error).splitlines()[0]}"
    return best, tiles[best.variant]


def _in_xla_fp8(op, setup, dots, quantizes):
    """Returns the XLA programs that an FP8 case is compared with, by table column.

    The result is {column of the table: {description: program}}: XLA_F8 multiplies FP8
    values, XLA_QDQ dequantized values. `dots` has XLA's fastest bf16 dots by GEMM.
    `quantizes` is whether the programs also quantize gradients.
    """
    scaled = {
        gemm: peers.ScaledDot(DotVariant(gemm[-2:], sums_in_f32=True), dot)
        for gemm, dot in dots.items()
    }
    layers = functools.partial(
        peers.QuantizedCollectives,
        recipe=setup.recipe,
        # XLA's FP8 dot cannot multiply by scales that change along K, so gradients are
        # quantized only by recipes with one scale per tensor.
        quantizes_gradients=quantizes and has_one_scale(setup.recipe),
    )
    return {
        name: op.with_layers(
            functools.partial(layers, dequantizes=name == cases.XLA_QDQ), scaled, WIDE
        )
        for name in (cases.XLA_F8, cases.XLA_QDQ)
        # XLA has no dot of FP8 values with a scale per block, as in MXFP8.
        if name == cases.XLA_QDQ or setup.dtype != "mxfp8"
    }


def _memory(op, shape, own, best, ranks):
    x = own.operands[0]
    avoided = "the gathered x [M, K]"
    avoided_bytes = shape.M * shape.K * x.dtype.itemsize
    if op.is_row:
        avoided = "the partial sums [M, N] of each rank"
        avoided_bytes = shape.M * shape.N * peers.wide_dtype(x).itemsize
    # Frees jax_ub's communication buffers first, because they keep the largest size of
    # all earlier cases.
    communicators.release_slots()
    own()
    return Memory(
        own_bytes=cases.temp_bytes(own),
        peer_bytes=cases.temp_bytes(best),
        avoided=avoided,
        avoided_bytes=avoided_bytes,
        workspace_bytes=memory_report().held_bytes,
        residual_bytes=cases.residual_bytes(own, ranks.num_ranks),
    )


def _column(layers, dots, x, w):
    return layers.gather_dot(x, w, dots["column_nn"])


def _row(layers, dots, x, w):
    return layers.dot_scatter(x, w, dots["row_nn"])


def _row_psum(layers, dots, x, w):
    return layers.dot_psum(x, w, dots["row_nn"])


def _row_scatter_and_gather(layers, dots, x, w):
    return layers.gather(_row(layers, dots, x, w))


def _pair(layers, dots, x, w1, w2, dy):
    dtype = peers.wide_dtype(x)
    hidden = layers.quantized(_column(layers, dots, x, w1), INPUT)
    y = _row(layers, dots, hidden, w2)
    dy = layers.quantized(dy, OUTPUT_GRAD)
    d_hidden = layers.gather_dot(dy, w2, dots["row_nt"])
    dw2 = dots["row_tn"](hidden, layers.gather(dy), dtype)
    d_hidden = layers.quantized(d_hidden, OUTPUT_GRAD)
    dx = layers.dot_scatter(d_hidden, w1, dots["column_nt"])
    return y, dx, dots["column_tn"](layers.gather(x), d_hidden, dtype), dw2


def _with_gradients(column: Program, row: Program) -> Program:
    def program(x, w1, w2, dy):
        y, backward = jax.vjp(lambda x, w1, w2: row(column(x, w1), w2), x, w1, w2)
        return (y, *map(source_of, backward(dy)))

    return program


def _own_pair(method, fp8=None, hidden=lambda x: x):
    layer = functools.partial(ub.linear, axis_name=AXIS, method=method, fp8=fp8)
    column, row = (functools.partial(layer, parallel=p) for p in ("column", "row"))
    return _with_gradients(column, lambda x, w: row(hidden(x), w))


def _forward_op(public, naive, gemm, programs) -> LinearOp:
    return LinearOp(
        name=public.__name__,
        operands=_GEMMS[gemm][:2],
        # The result of GEMM+AR is replicated: each rank has all rows. It is declared as
        # sharded by rows, because shard_map would otherwise check the replication.
        results=_GEMMS[gemm][2:],
        gemms=(gemm,),
        programs=programs,
        own=lambda method, **fp8: functools.partial(
            public, axis_name=AXIS, method=method, **fp8
        ),
        naive=naive,
    )


_SCATTER = {"psum_scatter": _row}
_REDUCE = {"psum_scatter and all_gather": _row_scatter_and_gather, "psum": _row_psum}
FORWARD_OPS = {
    op.name: op
    for op in (
        _forward_op(
            ub.all_gather_matmul, peers.naive_column, "column_nn", {"": _column}
        ),
        _forward_op(ub.matmul_reduce_scatter, peers.naive_row, "row_nn", _SCATTER),
        _forward_op(ub.matmul_all_reduce, peers.naive_all_reduce, "row_nn", _REDUCE),
    )
}
# The column-parallel and the row-parallel layer of an MLP with their gradients: six
# GEMMs, two all-gathers and two reduce-scatters.
PAIR = LinearOp(
    name="linear_pair",
    operands=("MK", "KN", "NK", "MK"),
    results=("MK", "MK", "KN", "NK"),
    gemms=tuple(_GEMMS),
    programs={"psum_scatter": _pair},
    own=_own_pair,
    naive=_with_gradients(peers.naive_column, peers.naive_row),
)
LINEAR_OPS = {**FORWARD_OPS, PAIR.name: PAIR}
