"""Builds the benchmark cases of `jax_ub.ops`: sequences that it runs as one fused call.

Each case times the forward and backward pass: fused, unfused, and in plain `jax.lax`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub import ops
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Memory, Place
from jax_ub._src.tools.bench.devices import AXIS, Spec, normal
from jax_ub._src.tools.bench.peak import at_peak
from jax_ub._src.tools.bench.timing import Candidate
from jax_ub._src.tools.bench.workloads import Shape

_Sized = tuple[tuple[int, ...], Spec]
_ROWS, _FEATURES = Spec(AXIS), Spec(None, AXIS)


@dataclasses.dataclass(frozen=True)
class _Window:
    """A sequence of `jax_ub.ops` operations that can be fused, and its array shapes.

    Attributes:
        variant: name in the table.
        make: returns the operations for a method.
        x: shape and sharding of the input.
        y: shape and sharding of the result.
        num_gemms: number of GEMMs of size M x K x N, forward and backward.
        extra: "input" if there is an extra input (with the shape of `y`), "output" if
            there is an extra output (with the shape of `x`), or "".
    """

    variant: str
    make: Callable[[str | None], Sequence[ops.BasicOperation]]
    x: _Sized
    y: _Sized
    num_gemms: int = 3
    extra: str = ""

    def function(self, method: str | None) -> Callable[..., Any]:
        """Returns a function that runs the sequence forward and backward with `method`.

        It maps (params, x, dy, *extra) to the result and the gradients of all inputs.
        """
        seq = ops.Sequential(*self.make(method))

        def program(params, x, dy, *extra):
            inputs = extra if self.extra == "input" else ()
            y, transposed = jax.vjp(seq, params, x, *inputs)
            cotangents = (dy, *extra) if self.extra == "output" else dy
            return y, transposed(cotangents)

        return program


def fused(place: Place, shape: Shape) -> list[Case]:
    """Returns the cases of all sequences that `jax_ub.ops` can fuse at this size.

    With several ranks, they overlap GEMMs with collectives; with one rank, they fuse
    local operations such as a linear layer and its bias.
    """
    windows = _overlapped if place.num_ranks > 1 else _local
    found = windows(shape, jnp.dtype(place.dtype))
    return [_case(place, shape, window) for window in found]


def _overlapped(shape, dtype):
    m, k, n = shape.M, shape.K, shape.N
    options: dict[str, Any] = {
        "axis_name": AXIS,
        "sequence_parallel": True,
        "userbuffers_options": {"comm_name": "bench"},
        "param_dtype": dtype,
    }

    def column(method):
        linear = ops.BasicLinear(
            k, n, tensor_parallel_mode="column", method=method, **options
        )
        return linear, ops.Bias(n, tensor_parallel=True, axis_name=AXIS)

    def row(method):
        linear = ops.BasicLinear(
            n, k, tensor_parallel_mode="row", method=method, **options
        )
        return linear, ops.Bias(k), ops.AddExtraInput(in_place=True)

    def residual(method):
        linear = ops.BasicLinear(
            n, k, tensor_parallel_mode="row", method=method, **options
        )
        return ops.MakeExtraOutput(in_place=True), linear

    narrow, wide = ((m, k), _ROWS), ((m, n), _FEATURES)
    return [
        _Window("column, bias", column, narrow, wide),
        _Window("row, bias, add", row, wide, narrow, extra="input"),
        _Window("residual, row", residual, wide, narrow, extra="output"),
    ]


def _local(shape, dtype):
    m, k, n = shape.M, shape.K, shape.N
    narrow, wide = ((m, k), Spec()), ((m, n), Spec())
    add, scale = ops.AddExtraInput(in_place=True), ops.ConstantScale(0.5)

    def around(*others, before=(), inputs=k, outputs=n):
        def make(method):
            linear = ops.BasicLinear(inputs, outputs, method=method, param_dtype=dtype)
            return (*before, linear, *others)

        return make

    residual = (ops.MakeExtraOutput(in_place=True),)
    norm = (ops.MakeExtraOutput(), ops.RMSNorm(n))
    return [
        _Window("linear, bias", around(ops.Bias(n)), narrow, wide),
        _Window(
            "linear, bias, add", around(ops.Bias(n), add), narrow, wide, extra="input"
        ),
        _Window("linear, scale, add", around(scale, add), narrow, wide, extra="input"),
        _Window("linear, scale", around(scale), narrow, wide),
        _Window(
            "residual, linear",
            around(before=residual, inputs=n, outputs=k),
            wide,
            narrow,
            extra="output",
        ),
        _Window(
            "bias, GELU", lambda _: (ops.Bias(n), ops.GELU()), wide, wide, num_gemms=0
        ),
        _Window(
            "residual, RMSNorm", lambda _: norm, wide, wide, num_gemms=0, extra="output"
        ),
    ]


def _case(place: Place, shape: Shape, window: _Window) -> Case:
    operands, specs, out_specs = _operands(place, window)
    own, unfused, plain = (
        Candidate(
            name, place.ranks.program(function, specs, out_specs), operands, way=way
        )
        for name, function, way in (
            (cases.OWN, window.function(place.method), ""),
            (cases.UNFUSED, _one_by_one(window.function(place.method)), ""),
            (
                cases.BEST,
                _one_by_one(window.function("xla")),
                "the same operations in plain jax.lax",
            ),
        )
    )
    flops = window.num_gemms * shape.flops
    memory = Memory(
        own_bytes=cases.temp_bytes(own),
        peer_bytes=cases.temp_bytes(plain),
        avoided="what the unfused operations need",
        avoided_bytes=cases.temp_bytes(unfused),
        workspace_bytes=0,
    )
    return Case(
        op="fused",
        variant=window.variant,
        dtype=place.dtype,
        num_ranks=place.num_ranks,
        shape=shape,
        flops=flops,
        candidates=[own, plain, unfused, *at_peak(place.ranks, place.dtype, flops)],
        memory=memory,
    )


def _one_by_one(function):
    """Wraps `function` so that `jax_ub.ops` traces its operations without fusions."""

    def program(*operands):
        with ops.without_fusions():
            return function(*operands)

    return program


def _operands(place, window):
    """Returns a sequence's operands, their shardings and the results' shardings."""
    seq = ops.Sequential(*window.make(None))
    shapes = jax.eval_shape(seq.init, jax.random.key(0))
    params = [
        {name: _drawn(place, own.shape, spec[name]) for name, own in part.items()}
        for part, spec in zip(shapes, seq.specs(), strict=True)
    ]
    x, dy = (_drawn(place, *sized) for sized in (window.x, window.y))
    # An extra output is the input x itself; an extra input is added to the result.
    specs, gradients = [seq.specs(), window.x[1], window.y[1]], [window.x[1]]
    operands, result = [tuple(params), x, dy], window.y[1]
    if window.extra:
        sized = window.y if window.extra == "input" else window.x
        operands.append(_drawn(place, *sized))
        specs.append(sized[1])
        if window.extra == "input":
            gradients.append(sized[1])
        else:
            result = (result, sized[1])
    return operands, specs, (result, (seq.specs(), *gradients))


def _drawn(place, shape, spec):
    fan_in = shape[0] if len(shape) == 2 else 1
    scale = fan_in**-0.5 if spec not in (_ROWS, _FEATURES) else 1.0
    array = normal(len(shape), shape, np.dtype(jnp.dtype(place.dtype)), scale)
    return place.ranks.place(array, spec)
