"""Checks every op and method exactly over several processes, which may share a GPU.

    python -m jax_ub launch -n 4 tests/gpu/ranks.py --rounds 3
    python -m jax_ub launch -n 4 tests/gpu/ranks.py --share-gpu

XLA's collectives are not used, because NCCL rejects ranks that share a GPU. Operands
are small integers, drawn from the same seeds in every process, so each process computes
the exact results of its rank. Prints a line for every program, with the position of an
error. The remaining programs still run, unless a call fails. The last program was
exported, and must fail on GPUs with its devices in a different order. XLA compiles no
kernels for these programs, so they also run on emulated GPUs (`test_emulated.py`).
With --fp8, only programs with FP8 operands run.
"""

import argparse
import faulthandler
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src.runtime import communicators, cuda_engine

ROWS, COLUMNS, WHOLE = P("tp"), P(None, "tp"), P()
DTYPES = ("bfloat16", "float32", "float16")
FP8 = ("float8_e4m3fn",)
METHODS = ("auto", "ring_exchange", "pipeline", "external")
# Elements of several blocks of the all-reduce kernel; the last vector is not full.
ALL_REDUCED = 20_003
STUCK_AFTER_S = 45


def main():
    given = read_arguments()
    # Prints the stacks of a hanging host before the GPU check ends the step.
    faulthandler.dump_traceback_later(STUCK_AFTER_S)
    # If processes share a GPU, it is device 0 of each of them.
    jax.distributed.initialize(local_device_ids=[0] if given.share_gpu else None)
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    on_gpu = cuda_engine.is_cuda(jax.local_devices()[0])
    capacity = (max(given.scale * 16 * mesh.size, ALL_REDUCED), 16 * mesh.size)
    ub.initialize_ub(capacity, mesh.size, mesh=mesh)
    for connection in communicators.connections():
        # Only communicators of GPUs share their memory in one of several modes.
        if hasattr(connection.communicator, "sharing_mode"):
            say(f"memory is shared by {connection.communicator.sharing_mode}")
            for mode, reason in connection.communicator.fallbacks:
                say(f"not by {mode}: {reason}")
    methods = given.methods.split(",") if given.methods else list(METHODS)
    methods += [] if on_gpu or given.methods else ["direct"]
    dtypes, programs = DTYPES[: given.dtypes], (column, row, whole, trained)
    if given.fp8:
        dtypes, programs = FP8, scaled_programs(on_gpu)
    wrong = []
    for dtype in dtypes:
        for method in methods:
            for program in programs:
                wrong += check(program, mesh, method, jnp.dtype(dtype), given)
    if not given.fp8:
        wrong += check_exported(mesh, on_gpu, given.scale)
    ub.destroy_ub()
    if wrong:
        sys.exit(f"{len(wrong)} results are wrong, the first: {wrong[0]}")
    say(f"all right: {mesh.size} ranks on {jax.devices()[0].device_kind}")


def check(program, mesh, method, dtype, given):
    """Runs a program with new operands each round, several times in a row each.

    Returns:
        Descriptions of errors.
    """
    wrong = []
    function, in_specs, out_specs, shapes, reference = program(
        mesh, method, given.scale
    )
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    compiled = jax.jit(mapped)
    name = f"{program.__name__} {method} {dtype} over {mesh.size} ranks"
    for seed in range(given.rounds):
        # Two alternating sets, so that results of the previous call are detected.
        sets = [
            [draw(31 * seed + 7 * turn + i, shape) for i, shape in enumerate(shapes)]
            for turn in range(2)
        ]
        placed = [
            [
                place(mesh, spec, x, getattr(shape, "dtype", dtype))
                for spec, x, shape in zip(in_specs, one, shapes, strict=True)
            ]
            for one in sets
        ]
        expected = [reference(*operands) for operands in sets]
        calls = [compiled(*placed[call % 2]) for call in range(given.calls)]
        for call, results in enumerate(jax.block_until_ready(calls)):
            for result, right in zip(results, expected[call % 2], strict=True):
                wrong += compare(f"{name}, seed {seed}, call {call}", result, right)
    if wrong:
        print(f"wrong: {wrong[0]}", flush=True)
    else:
        say(f"right: {name}")
    return wrong


def check_exported(mesh, on_gpu, scale):
    """Runs an exported program, and on GPUs again with the devices in reverse order.

    Returns:
        Descriptions of errors.
    """
    function, in_specs, out_specs, shapes, reference = column(mesh, "auto", scale)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    operands = [draw(i, shape) for i, shape in enumerate(shapes)]

    def placed(mesh):
        pairs = zip(in_specs, operands, strict=True)
        return [place(mesh, spec, x, np.float32) for spec, x in pairs]

    export = jax.export.export(jax.jit(mapped), disabled_checks=ub.export_safety_checks)
    call = jax.jit(export(*placed(mesh)).call)
    name = f"exported column over {mesh.size} ranks"
    wrong = []
    # XLA captures the second call. The third call ends on no rank before the second has
    # ended on all ranks: a failing call also fills the peers' pending results with NaN.
    *calls, _ = [call(*placed(mesh)) for _ in range(3)]
    for number, results in enumerate(jax.block_until_ready(calls)):
        for result, right in zip(results, reference(*operands), strict=True):
            wrong += compare(f"{name}, call {number}", result, right)
    if on_gpu and mesh.size > 1:
        turned = Mesh(mesh.devices[::-1], mesh.axis_names)
        if not fails(call, placed(turned)):
            wrong.append(f"{name}: with the devices turned around it does not fail")
    say(f"wrong: {wrong[0]}" if wrong else f"right: {name}")
    return wrong


def fails(call, operands):
    """Returns whether a call fails because of its device order, by NaN or an error."""
    try:
        results = jax.block_until_ready(call(*operands))
        shards = [s.data for result in results for s in result.addressable_shards]
        if not all(np.isnan(np.asarray(shard)).all() for shard in shards):
            return False
        ub.check_communicators()
    except RuntimeError as error:
        # A peer sends the error if its device was exchanged.
        said = ("lowered for export", "failed and notified")
        return any(text in str(error) for text in said)
    return False


def column(mesh, method, scale):
    """Runs AG+GEMM with two kernels and biases, and returns the gathered x, too."""
    M, K, N = 8 * scale * mesh.size, 16, 8 * mesh.size

    def function(x, w, v, bias):
        ys, gathered = ub.all_gather_matmul(
            x,
            (w, v),
            axis_name="tp",
            bias=(bias, bias),
            method=method,
            return_gathered=True,
        )
        return *ys, gathered

    def reference(x, w, v, bias):
        return x @ w + bias, x @ v + bias, np.concatenate([x] * mesh.size)

    shapes = ((M, K), (K, N), (K, N), (N,))
    specs = (ROWS, COLUMNS, COLUMNS, P("tp"))
    # The copies of the gathered x of all ranks, concatenated.
    return function, specs, (COLUMNS, COLUMNS, ROWS), shapes, reference


def row(mesh, method, scale):
    """Runs GEMM+RS with bias and residual."""
    M, K, N = 8 * scale * mesh.size, 8 * mesh.size, 16

    def function(x, w, bias, residual):
        return (
            ub.matmul_reduce_scatter(
                x, w, axis_name="tp", method=method, bias=bias, residual=residual
            ),
        )

    def reference(x, w, bias, residual):
        return (x @ w + bias + residual,)

    shapes = ((M, K), (K, N), (N,), (M, N))
    return function, (COLUMNS, ROWS, WHOLE, ROWS), (ROWS,), shapes, reference


def whole(mesh, method, scale):
    """Runs GEMM+AR of batched tokens, and all-reduces without and with addends.

    The all-reduce without addends has many blocks and a rest.
    """
    M, K, N = 4 * scale * mesh.size, 16 * mesh.size, 16

    def function(x, w, bias, residual, z):
        options = {"axis_name": "tp", "method": method}
        return (
            ub.matmul_all_reduce(x, w, **options),
            ub.matmul_all_reduce(x, w, bias=bias, residual=residual, **options),
            ub.all_reduce(z, axis_name="tp"),
            ub.all_reduce(x, axis_name="tp", bias=bias, residual=residual),
        )

    def reference(x, w, bias, residual, z):
        y, addends = x @ w, bias + residual
        summed = x.reshape(2, M, mesh.size, N).sum(2)
        return y, y + addends, z.sum(0, keepdims=True), summed + addends

    shapes = ((2, M, K), (K, N), (N,), (2, M, N), (mesh.size, ALL_REDUCED))
    specs = (P(None, None, "tp"), ROWS, WHOLE, WHOLE, ROWS)
    return function, specs, (WHOLE,) * 4, shapes, reference


def trained(mesh, method, scale):
    """Runs a column and a row linear, forward and backward."""
    M, K, N = 8 * scale * mesh.size, 16, 8 * mesh.size

    def function(x, w, v, dh, dy):
        def column(x, w):
            return ub.all_gather_matmul(x, w, axis_name="tp", method=method)

        def row(h, v):
            return ub.matmul_reduce_scatter(h, v, axis_name="tp", method=method)

        h, column_backward = jax.vjp(column, x, w)
        y, row_backward = jax.vjp(row, h, v)
        return y, *row_backward(dy), *column_backward(dh)

    def reference(x, w, v, dh, dy):
        h = x @ w
        return h @ v, dy @ v.T, h.T @ dy, dh @ w.T, x.T @ dh

    shapes = ((M, K), (K, N), (N, 16), (M, N), (M, 16))
    specs = (ROWS, COLUMNS, ROWS, COLUMNS, ROWS)
    return function, specs, (ROWS, COLUMNS, ROWS, ROWS, COLUMNS), shapes, reference


def scaled(mesh, method, scale):
    """Runs AG+GEMM, GEMM+RS and GEMM+AR of FP8 operands with one scale per tensor.

    Kernels are stored as [out, in], since XLA would transpose others by a kernel.
    """
    M, K, N = 8 * scale * mesh.size, 16, 16 * mesh.size

    def function(x, w, h, v, x_scale, w_scale):
        x, h = (ub.ScaledArray(values, x_scale) for values in (x, h))
        w, v = (ub.ScaledArray(values, w_scale) for values in (w, v))
        options = {"axis_name": "tp", "method": method, "rhs_transposed": True}
        return (
            ub.all_gather_matmul(x, w, **options),
            ub.matmul_reduce_scatter(h, v, **options),
            ub.matmul_all_reduce(h, v, **options),
        )

    def reference(x, w, h, v, x_scale, w_scale):
        factor = x_scale * w_scale
        return factor * (x @ w.T), factor * (h @ v.T), factor * (h @ v.T)

    shapes = ((M, K), (N, K), (M, N), (K, N), Scales(()), Scales(()))
    specs = (ROWS, ROWS, COLUMNS, COLUMNS, WHOLE, WHOLE)
    return function, specs, (COLUMNS, ROWS, WHOLE), shapes, reference


def scaled_rows(mesh, method, scale):
    """Runs AG+GEMM, GEMM+RS and GEMM+AR of FP8 operands with scales of rows."""
    return scaled_by(jnp.float32, mesh, method, scale)


def scaled_blocks(mesh, method, scale):
    """Runs AG+GEMM, GEMM+RS and GEMM+AR of FP8 operands with scales of blocks."""
    return scaled_by(jnp.float8_e8m0fnu, mesh, method, scale)


def scaled_by(dtype, mesh, method, scale):
    # Each rank contracts one block, so that rows and blocks have the same scales.
    M, K, N = 16 * scale * mesh.size, 32, 32 * mesh.size

    def function(x, w, h, v, *scales):
        x, w, h, v = map(ub.ScaledArray, (x, w, h, v), scales)
        options = {"axis_name": "tp", "method": method, "rhs_transposed": True}
        return (
            ub.all_gather_matmul(x, w, **options),
            ub.matmul_reduce_scatter(h, v, **options),
            ub.matmul_all_reduce(h, v, **options),
        )

    def reference(*operands):
        x, w, h, v = (
            values * np.repeat(scales, K, axis=1)
            for values, scales in zip(operands[:4], operands[4:], strict=True)
        )
        return x @ w.T, h @ v.T, h @ v.T

    shapes = ((M, K), (N, K), (M, N), (K, N))
    scales = [Scales((rows, columns // K), dtype) for rows, columns in shapes]
    specs = (ROWS, ROWS, COLUMNS, COLUMNS)
    return (function, specs * 2, (COLUMNS, ROWS, WHOLE), (*shapes, *scales), reference)


def scaled_programs(on_gpu):
    """Returns the programs of FP8 operands that the device runs as FP8."""
    units = {"row": scaled_rows, "block": scaled_blocks}
    return scaled, *(
        program
        for unit, program in units.items()
        if not on_gpu or cuda_engine.why_no_fp8(jax.devices(), unit) is None
    )


class Scales(NamedTuple):
    """The shape and dtype of an operand that has scales, powers of two."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32


def draw(seed, shape):
    """Returns integers -1, 0 and 1, whose sums are exact in every dtype, or scales."""
    random = np.random.default_rng(seed)
    if isinstance(shape, Scales):
        return (2.0 ** random.integers(-1, 2, shape.shape)).astype(np.float32)
    return random.integers(-1, 2, shape).astype(np.float32)


def place(mesh, spec, x, dtype):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: x[index].astype(dtype)
    )


def compare(name, result, right):
    for shard in result.addressable_shards:
        found = np.asarray(shard.data).astype(np.float32)
        wanted = right[shard.index].astype(result.dtype).astype(np.float32)
        if not np.array_equal(found, wanted):
            places = np.argwhere(found != wanted)
            first = tuple(places[0].tolist())
            yield (
                f"{name}: {len(places)} of {found.size} elements on {shard.device}, "
                f"the first at {first}: {found[first]} instead of {wanted[first]}"
            )


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="new operands each")
    parser.add_argument("--calls", type=int, default=4, help="in a row, each round")
    parser.add_argument("--scale", type=int, default=1, help="factor of the tokens")
    parser.add_argument("--methods", help="comma-separated; all unless given")
    parser.add_argument("--dtypes", type=int, default=3, help=f"how many of {DTYPES}")
    parser.add_argument("--fp8", action="store_true", help="FP8 operands only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
