"""Builds the benchmark cases of `jax_ub.ops`: sequences that it runs as one fused call.

Each case times the forward and backward pass: fused, unfused, and in plain `jax.lax`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub import ops
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Memory, Setup
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, COLUMNS, ROWS, Spec, normal
from jax_ub._src.tools.timing import Candidate


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A benchmarked list of `jax_ub.ops` operations, and its arrays' dimensions.

    `make` returns the operations for a method. `x` and `y` are the dimensions of the
    input and the result, such as "MK". An extra "input" has the shape of `y`, an extra
    "output" the shape of `x`.
    """

    variant: str
    make: Callable[[str | None], Sequence[ops.BasicOperation]]
    x: str
    y: str
    num_gemms: int = 3
    extra: str = ""

    def program(self, method: str | None, *, is_fused: bool) -> Callable[..., Any]:
        """Returns the program to time, which computes the result and all gradients.

        It takes (params, x, dy, *extra), where dy is the gradient of the result.
        `method` is how GEMMs overlap with communication; None is the default. Unless
        `is_fused`, each operation runs on its own.
        """
        seq = ops.Sequential(*self.make(method))

        def run(params, x, dy, *extra):
            inputs = extra if self.extra == "input" else ()
            with contextlib.nullcontext() if is_fused else ops.without_fusions():
                y, transposed = jax.vjp(seq, params, x, *inputs)
                return y, transposed((dy, *extra) if self.extra == "output" else dy)

        return run


def fused(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark cases of operations that `jax_ub.ops` fuses at this size.

    With several ranks, they overlap GEMMs with collectives; with one rank, they fuse
    local operations such as a linear layer and its bias.
    """
    sequences = _overlapped if setup.num_ranks > 1 else _local
    found = sequences(shape, jnp.dtype(setup.dtype))
    return [_case(setup, shape, sequence) for sequence in found]


def _overlapped(shape, dtype):
    k, n = shape.K, shape.N

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

    return [
        _Sequence("column, bias", column, "MK", "MN"),
        _Sequence("row, bias, add", row, "MN", "MK", extra="input"),
        _Sequence("residual, row", residual, "MN", "MK", extra="output"),
    ]


def _local(shape, dtype):
    k, n = shape.K, shape.N
    add, scale = ops.AddExtraInput(in_place=True), ops.ConstantScale(0.5)
    bias, gelu = ops.Bias(n), ops.GELU()

    def after_linear(*others):
        def make(method):
            return ops.BasicLinear(k, n, method=method, param_dtype=dtype), *others

        return make

    def residual(method):
        linear = ops.BasicLinear(n, k, method=method, param_dtype=dtype)
        return ops.MakeExtraOutput(in_place=True), linear

    norm = (ops.MakeExtraOutput(), ops.RMSNorm(n))
    up, down, wide = ("MK", "MN"), ("MN", "MK"), ("MN", "MN")
    return [
        _Sequence("linear, bias", after_linear(bias), *up),
        _Sequence("linear, bias, add", after_linear(bias, add), *up, 3, "input"),
        _Sequence("linear, scale, add", after_linear(scale, add), *up, 3, "input"),
        _Sequence("linear, scale", after_linear(scale), *up),
        _Sequence("residual, linear", residual, *down, 3, "output"),
        _Sequence("bias, GELU", lambda _: (bias, gelu), *wide, 0),
        _Sequence("residual, RMSNorm", lambda _: norm, *wide, 0, "output"),
    ]


def _case(setup: Setup, shape: Shape, sequence: _Sequence) -> Case:
    operands, specs, out_specs = _operands(setup, shape, sequence)

    def candidate(name, method, is_fused, variant=""):
        function = sequence.program(method, is_fused=is_fused)
        program = setup.ranks.program(function, specs, out_specs)
        return Candidate(name, program, operands, variant)

    own = candidate(cases.OWN, setup.method, is_fused=True)
    unfused = candidate(cases.UNFUSED, setup.method, is_fused=False)
    text = "the same operations in plain jax.lax"
    best = candidate(cases.BEST, "xla", is_fused=False, variant=text)
    own_bytes, peer_bytes, avoided_bytes = map(cases.temp_bytes, (own, best, unfused))
    avoided = "what the unfused operations need"
    return setup.case(
        "fused",
        shape,
        [own, best, unfused],
        num_gemms=sequence.num_gemms,
        variant=sequence.variant,
        memory=Memory(own_bytes, peer_bytes, avoided, avoided_bytes),
    )


def _operands(setup, shape, sequence):
    """Draws random operands; returns (operands, partition specs, result specs)."""

    def draw(array_shape, spec, scale=1.0):
        array = normal(len(array_shape), array_shape, jnp.dtype(setup.dtype), scale)
        return setup.ranks.place(array, spec)

    def sharded(dims):
        spec = COLUMNS if "N" in dims else ROWS
        return shape.sizes(dims), spec if setup.num_ranks > 1 else Spec()

    seq = ops.Sequential(*sequence.make(None))
    shapes = jax.eval_shape(seq.init, jax.random.key(0))
    params = tuple(
        {
            name: draw(param.shape, spec[name], max(param.shape) ** -0.5)
            for name, param in part.items()
        }
        for part, spec in zip(shapes, seq.specs(), strict=True)
    )
    x, y = sharded(sequence.x), sharded(sequence.y)
    extra = {"input": [y], "output": [x], "": []}[sequence.extra]
    operands = [params, *(draw(*array) for array in (x, y, *extra))]
    specs = [seq.specs(), *(spec for _, spec in (x, y, *extra))]
    # The program returns the results and the gradients of its inputs. An extra output
    # is the input x itself; an extra input is added to the result, and has a gradient.
    if sequence.extra == "output":
        return operands, specs, ((y[1], x[1]), (seq.specs(), x[1]))
    return operands, specs, (y[1], (seq.specs(), x[1], *(spec for _, spec in extra)))
