"""Builds the benchmark cases of `jax_ub.ops`: sequences that it runs as one fused call.

Each case times the forward and backward pass: fused, unfused, and in plain `jax.lax`.
"""

import contextlib

import jax
import jax.numpy as jnp

from jax_ub import ops
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Memory, Setup
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, COLUMNS, ROWS, Spec, normal
from jax_ub._src.tools.programs import Programs

# A sequence to benchmark: the dimensions of its input and of its result, such as "MK"
# for [M, K], and its operations. An extra input has the shape of the result, and an
# extra output has the shape of the input.
_Sequence = tuple[str, str, tuple[ops.BasicOperation, ...]]


def fused(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark cases of operations that `jax_ub.ops` fuses at this size.

    With several ranks, they overlap GEMMs with collectives; with one rank, they fuse
    local operations such as a linear layer and its bias.
    """
    sequences = _overlapped if setup.ranks.num_ranks > 1 else _local
    # `own` and `plain` differ only in the method: None selects jax_ub's default, and
    # "xla" selects plain `jax.lax`.
    own, plain = (
        sequences(shape, jnp.dtype(setup.dtype), method) for method in (None, "xla")
    )
    return [_case(setup, shape, name, *own[name], plain[name][2]) for name in own]


def _overlapped(shape, dtype, method) -> dict[str, _Sequence]:
    k, n = shape.K, shape.N

    def linear(mode, num_in, num_out):
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

    column, row = linear("column", k, n), linear("row", n, k)
    column_bias = ops.Bias(n, tensor_parallel=True, axis_name=AXIS)
    add = ops.AddExtraInput(in_place=True)
    residual = ops.MakeExtraOutput(in_place=True)
    return {
        "column, bias": ("MK", "MN", (column, column_bias)),
        "row, bias, add": ("MN", "MK", (row, ops.Bias(k), add)),
        "residual, row": ("MN", "MK", (residual, row)),
    }


def _local(shape, dtype, method) -> dict[str, _Sequence]:
    k, n = shape.K, shape.N
    up = ops.BasicLinear(k, n, method=method, param_dtype=dtype)
    down = ops.BasicLinear(n, k, method=method, param_dtype=dtype)
    add, scale = ops.AddExtraInput(in_place=True), ops.ConstantScale(0.5)
    bias, residual = ops.Bias(n), ops.MakeExtraOutput(in_place=True)
    return {
        "linear, bias": ("MK", "MN", (up, bias)),
        "linear, bias, add": ("MK", "MN", (up, bias, add)),
        "linear, scale, add": ("MK", "MN", (up, scale, add)),
        "linear, scale": ("MK", "MN", (up, scale)),
        "residual, linear": ("MN", "MK", (residual, down)),
        "bias, GELU": ("MN", "MN", (bias, ops.GELU())),
        "residual, RMSNorm": ("MN", "MN", (ops.MakeExtraOutput(), ops.RMSNorm(n))),
    }


def _case(setup, shape, variant, x, y, operations, plain) -> Case:
    """Returns the benchmark case that compares `ops.Sequential(*operations)` with XLA.

    `plain` is the same sequence of operations in plain JAX.
    """

    def spec_of(dims):
        spec = COLUMNS if "N" in dims else ROWS
        return spec if setup.ranks.num_ranks > 1 else Spec()

    def draw(array_shape, spec, scale=1.0):
        array = normal(len(array_shape), array_shape, jnp.dtype(setup.dtype), scale)
        return setup.ranks.place(array, spec)

    seq = ops.Sequential(*operations)
    params = jax.tree.map(
        lambda param, spec: draw(param.shape, spec, max(param.shape) ** -0.5),
        *(jax.eval_shape(seq.init, jax.random.key(0)), seq.specs()),
    )
    inputs = [y] * sum(op.num_extra_inputs for op in operations)
    outputs = [x] * sum(op.num_extra_outputs for op in operations)
    operands = (x, y, *inputs, *outputs)  # x, dy, extra inputs, gradients of outputs
    specs = [*map(spec_of, operands)]
    arrays = [*map(draw, map(shape.sizes, operands), specs)]
    # The program returns the results and the gradients of its inputs. An extra output
    # equals the input x. An extra input is added to the result, and has a gradient.
    results = jax.tree.map(spec_of, (y, *outputs) if outputs else y)
    gradients = (seq.specs(), *map(spec_of, (x, *inputs)))
    programs = Programs(
        *(setup.ranks, [params, *arrays], [seq.specs(), *specs], (results, gradients))
    )

    def candidate(name, operations, context):
        seq = ops.Sequential(*operations)

        def run(params, x, dy, *extra):
            added, dys = extra[: len(inputs)], extra[len(inputs) :]
            with context():
                y, transposed = jax.vjp(seq, params, x, *added)
                return y, transposed((dy, *dys) if dys else dy)

        return programs(name, run)

    own = candidate(cases.OWN, operations, contextlib.nullcontext)
    unfused = candidate(cases.UNFUSED, operations, ops.without_fusions)
    best = candidate(cases.BEST, plain, ops.without_fusions)
    has_gemms = any(isinstance(op, ops.BasicLinear) for op in operations)
    return setup.case(
        "fused",
        shape,
        [own, best, unfused],
        num_gemms=3 if has_gemms else 0,
        variant=variant,
        memory=Memory(*map(cases.temp_bytes, (own, best, unfused))),
    )
