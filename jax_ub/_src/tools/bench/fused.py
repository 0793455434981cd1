"""Builds the benchmark cases of `jax_ub.ops`: sequences that it runs as one fused call.

Each case times the forward and backward pass: fused, unfused, and in plain `jax.lax`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub import ops
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Memory, Setup, Shape
from jax_ub._src.tools.bench.machine import AXIS, Spec, normal
from jax_ub._src.tools.bench.timing import Candidate

_Sized = tuple[tuple[int, ...], Spec]
_ROWS, _FEATURES = Spec(AXIS), Spec(None, AXIS)


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A list of `jax_ub.ops` operations that a benchmark runs, and its array shapes.

    `make` returns the operations for a method. `x` and `y` are the shapes and shardings
    of the input and the result. An extra "input" has the shape of `y`, an extra
    "output" the shape of `x`.
    """

    variant: str
    make: Callable[[str | None], Sequence[ops.BasicOperation]]
    x: _Sized
    y: _Sized
    num_gemms: int = 3
    extra: str = ""

    def program(self, method: str | None, *, is_fused: bool) -> Callable[..., Any]:
        """Returns a function that runs the operations' forward and backward pass.

        It maps (params, x, dy, *extra) to the result and the gradients of all inputs.
        """
        seq = ops.Sequential(*self.make(method))

        def run(params, x, dy, *extra):
            inputs = extra if self.extra == "input" else ()
            y, transposed = jax.vjp(seq, params, x, *inputs)
            return y, transposed((dy, *extra) if self.extra == "output" else dy)

        def run_unfused(*operands):
            with ops.without_fusions():
                return run(*operands)

        return run if is_fused else run_unfused


def fused(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark cases of operations that `jax_ub.ops` fuses at this size.

    With several ranks, they overlap GEMMs with collectives; with one rank, they fuse
    local operations such as a linear layer and its bias.
    """
    sequences = _overlapped if setup.num_ranks > 1 else _local
    return [
        _case(setup, shape, sequence)
        for sequence in sequences(shape, jnp.dtype(setup.dtype))
    ]


def _overlapped(shape, dtype):
    m, k, n = shape.M, shape.K, shape.N

    def linear(mode, num_in, num_out, method):
        return ops.BasicLinear(
            num_in,
            num_out,
            tensor_parallel_mode=mode,
            method=method,
            axis_name=AXIS,
            sequence_parallel=True,
            userbuffers_options={"comm_name": "bench"},
            param_dtype=dtype,
        )

    def column(method):
        bias = ops.Bias(n, tensor_parallel=True, axis_name=AXIS)
        return linear("column", k, n, method), bias

    def row(method):
        add = ops.AddExtraInput(in_place=True)
        return linear("row", n, k, method), ops.Bias(k), add

    def residual(method):
        return ops.MakeExtraOutput(in_place=True), linear("row", n, k, method)

    narrow, wide = ((m, k), _ROWS), ((m, n), _FEATURES)
    return [
        _Sequence("column, bias", column, narrow, wide),
        _Sequence("row, bias, add", row, wide, narrow, extra="input"),
        _Sequence("residual, row", residual, wide, narrow, extra="output"),
    ]


def _local(shape, dtype):
    m, k, n = shape.M, shape.K, shape.N
    narrow, wide = ((m, k), Spec()), ((m, n), Spec())
    add, scale = ops.AddExtraInput(in_place=True), ops.ConstantScale(0.5)
    split = ops.MakeExtraOutput(in_place=True)

    def after_linear(*others):
        return lambda method: (
            ops.BasicLinear(k, n, method=method, param_dtype=dtype),
            *others,
        )

    def residual(method):
        return split, ops.BasicLinear(n, k, method=method, param_dtype=dtype)

    norm = (ops.MakeExtraOutput(), ops.RMSNorm(n))
    bias, gelu = ops.Bias(n), ops.GELU()
    found: list[tuple[Any, ...]] = [
        ("linear, bias", after_linear(bias), narrow, wide, 3),
        ("linear, bias, add", after_linear(bias, add), narrow, wide, 3, "input"),
        ("linear, scale, add", after_linear(scale, add), narrow, wide, 3, "input"),
        ("linear, scale", after_linear(scale), narrow, wide, 3),
        ("residual, linear", residual, wide, narrow, 3, "output"),
        ("bias, GELU", lambda _: (bias, gelu), wide, wide, 0),
        ("residual, RMSNorm", lambda _: norm, wide, wide, 0, "output"),
    ]
    return [_Sequence(*fields) for fields in found]


def _case(setup: Setup, shape: Shape, sequence: _Sequence) -> Case:
    operands, specs, out_specs = _operands(setup, sequence)

    def candidate(name, method, is_fused, variant=""):
        function = sequence.program(method, is_fused=is_fused)
        program = setup.ranks.program(function, specs, out_specs)
        return Candidate(name, program, operands, variant)

    own = candidate(cases.OWN, setup.method, is_fused=True)
    unfused = candidate(cases.UNFUSED, setup.method, is_fused=False)
    text = "the same operations in plain jax.lax"
    best = candidate(cases.BEST, "xla", is_fused=False, variant=text)
    memory = Memory(
        own_bytes=cases.temp_bytes(own),
        peer_bytes=cases.temp_bytes(best),
        avoided="what the unfused operations need",
        avoided_bytes=cases.temp_bytes(unfused),
    )
    return setup.case(
        "fused",
        shape,
        [own, best, unfused],
        num_gemms=sequence.num_gemms,
        variant=sequence.variant,
        memory=memory,
    )


def _operands(setup, sequence):
    """Returns the operands of a benchmarked sequence, and all shardings."""
    seq = ops.Sequential(*sequence.make(None))
    shapes = jax.eval_shape(seq.init, jax.random.key(0))
    params = tuple(
        {name: _draw(setup, param.shape, spec[name]) for name, param in part.items()}
        for part, spec in zip(shapes, seq.specs(), strict=True)
    )
    (_, x), (_, y) = sequence.x, sequence.y
    operands = [params, _draw(setup, *sequence.x), _draw(setup, *sequence.y)]
    specs, gradients, result = [seq.specs(), x, y], [x], y
    # An extra output is the input x itself; an extra input is added to the result.
    if sequence.extra == "input":
        operands.append(_draw(setup, *sequence.y))
        specs.append(y)
        gradients.append(y)
    elif sequence.extra == "output":
        operands.append(_draw(setup, *sequence.x))
        specs.append(x)
        result = (y, x)
    return operands, specs, (result, (seq.specs(), *gradients))


def _draw(setup, shape, spec):
    fan_in = shape[0] if len(shape) == 2 else 1
    scale = fan_in**-0.5 if spec not in (_ROWS, _FEATURES) else 1.0
    array = normal(len(shape), shape, jnp.dtype(setup.dtype), scale)
    return setup.ranks.place(array, spec)
