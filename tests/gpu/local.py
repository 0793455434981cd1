"""Checks every local op on one GPU exactly, and measures the host time of calls.

    python tests/gpu/local.py [--short] [--fp8]

Ops that communicate run over a mesh of one device. They fork and join streams, but have
no peers to wait for.

Operands are small integers, so the results must be equal to products of numpy. Failures
are printed, and the remaining ops are still run. Also runs on a CPU, with the same
programs. With --fp8, only FP8 operands are multiplied, casts to FP8 are compared with
ml_dtypes, and the times of the ops with those of bf16 operands.
"""

import argparse
import faulthandler
import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src import lowering_log
from jax_ub._src.scaled_array import cast

SIZES = ((7, 5, 3), (64, 128, 96), (257, 130, 65), (512, 1024, 256), (1, 1, 1))
DTYPES = ("bfloat16", "float32", "float16")
CHAIN = 64
SIDE = 128
FP8_SIZES = ((64, 128, 96), (16, 16, 16), (512, 1024, 256))
FP8_PAIRS = (  # dtypes of dy, and of w or x
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
)
TIMED_SIDE = 8192
STUCK_AFTER_S = 45
COMMUNICATING = (ub.all_gather_matmul, ub.matmul_reduce_scatter, ub.matmul_all_reduce)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    given = parser.parse_args()
    short = given.short
    # Prints the stacks of a hanging host before the GPU check ends the step.
    faulthandler.dump_traceback_later(STUCK_AFTER_S)
    failures = list(check_all_fp8(short) if given.fp8 else check_all(short))
    # XLA computed and would be timed in place of the engine.
    fallen = [f"plain jax.lax: {f.label}: {f.reason}" for f in lowering_log.fallbacks()]
    for text in (*failures, *fallen):
        print(text)
    if not failures and not fallen:
        print(f"all right on {jax.devices()[0].device_kind}", flush=True)
    if given.fp8 and not short and not fallen:
        compare_times()
    elif not short and not fallen:
        for name, (step, start) in chained().items():
            us = host_time_us(step, start)
            print(f"host time of {name} in a program of {CHAIN}: {us:.2f} us")
    return int(bool(failures or fallen))


def check_all(short):
    for dtype in DTYPES[: 1 if short else None]:
        for sizes in SIZES[: 2 if short else None]:
            yield from check(jnp.dtype(dtype), *sizes)


def check_all_fp8(short):
    # The emulated driver does not run XLA's kernels.
    if not jax.devices()[0].device_kind.startswith("Emulated"):
        yield from check_casts()
    for sizes in FP8_SIZES[: 2 if short else None]:
        for dtypes in FP8_PAIRS:
            yield from check_fp8(*dtypes, *sizes)


def check(dtype, M, K, N):
    """Runs all local ops once, and yields a description of each wrong result."""
    x, w, dy, residual, main_grad, bias = (
        draw(seed, shape)
        for seed, shape in enumerate(
            [(2, M, K), (K, N), (2, M, N), (2, M, K), (K, N), (N,)]
        )
    )
    rows, columns = x.reshape(-1, K), dy.reshape(-1, N)

    def put(*arrays):
        # Rounded here: jnp.asarray would compile a program for every shape.
        return [jax.device_put(array.astype(dtype)) for array in arrays]

    yield from compare(ub.linear, put(x, w, bias), x @ w + bias)
    yield from compare(ub.dgrad_add, put(dy, w, residual), dy @ w.T + residual)
    yield from compare(
        ub.wgrad_accumulate,
        [*put(x, dy), jax.device_put(main_grad)],
        main_grad + rows.T @ columns,
    )
    for op in COMMUNICATING if (M, K, N) in SIZES[:2] else ():
        yield from compare(alone(op), put(x, w), x @ w)


def check_fp8(dy_dtype, dtype, M, K, N):
    """Runs local ops of FP8 operands, and yields a description of each wrong result.

    The engine transposes both operands of `wgrad_accumulate` on GPUs that need it.
    """
    x, w, dy, residual, main_grad = (
        draw(seed, shape)
        for seed, shape in enumerate([(M, K), (K, N), (M, N), (M, K), (K, N)])
    )

    def put(array, dtype, scale):
        values = jax.device_put(array.astype(jnp.dtype(dtype)))
        return ub.ScaledArray(values, jax.device_put(np.float32(scale)))

    wide = jax.device_put(residual.astype(jnp.bfloat16))
    yield from compare(
        ub.dgrad_add,
        [put(dy, dy_dtype, 0.5), put(w, dtype, 4), wide],
        2 * (dy @ w.T) + residual,
    )
    yield from compare(
        ub.wgrad_accumulate,
        [put(x, dtype, 4), put(dy, dy_dtype, 0.5), jax.device_put(main_grad)],
        main_grad + 2 * (x.T @ dy),
    )


def check_casts():
    """Compares casts to FP8 with ml_dtypes: all bf16 numbers, and ties between codes.

    XLA converts on GPUs by other instructions than on CPUs.
    """
    every_bf16 = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    for dtype in map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2")):
        finite = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        finite = np.unique(finite[np.isfinite(finite)])
        ties = (finite[1:] + finite[:-1]) / 2
        around = (np.nextafter(ties, np.float32(to)) for to in (-np.inf, np.inf))
        x = np.concatenate([every_bf16.astype(np.float32), ties, *around])
        largest = float(jnp.finfo(dtype).max)
        wanted = np.clip(x, -largest, largest).astype(dtype)
        found = np.asarray(cast(jax.device_put(x), np.ones(1, np.float32), dtype))
        is_nan = np.isnan(x)
        same = np.where(is_nan, np.isnan(found.astype(np.float32)), found == wanted)
        signs = [np.signbit(each.astype(np.float32)) for each in (found, wanted)]
        same &= is_nan | (signs[0] == signs[1])
        if not np.all(same):
            yield f"wrong: casts to {dtype} of {x[~same][:8].tolist()}"


def compare_times():
    """Prints the times of FP8 and bf16 operands, each alternating with the other."""
    side = TIMED_SIDE
    wide = jnp.asarray(draw(0, (side, side)), jnp.bfloat16)
    fp8 = ub.ScaledArray(wide.astype(jnp.float8_e4m3fn), jnp.float32(1))
    added = {ub.dgrad_add: wide, ub.wgrad_accumulate: wide.astype(jnp.float32)}
    for op, start in added.items():
        times = {"FP8": [], "bf16": []}
        step = jax.jit(op)
        for _ in range(12):
            for name, operand in (("FP8", fp8), ("bf16", wide)):
                begin = time.perf_counter()
                jax.block_until_ready([step(operand, operand, start) for _ in range(8)])
                times[name].append((time.perf_counter() - begin) / 8)
        fp8_ms, bf16_ms = (1e3 * statistics.median(each[2:]) for each in times.values())
        print(
            f"{op.__name__} of {side} cubed: FP8 {fp8_ms:.3f} ms, bf16 {bf16_ms:.3f} ms"
        )


def alone(op):
    """Returns a function of x and w that runs an op over one rank."""

    @functools.wraps(op)
    def run(x, w):
        mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
        # With "auto", XLA would run the op on one rank.
        function = functools.partial(op, axis_name="tp", method="ring_exchange")
        whole = P()
        # A sum over one rank has the same value on all ranks.
        return jax.shard_map(
            function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )(x, w)

    return run


def compare(op, operands, wanted):
    shapes = [list(operand.shape) for operand in operands]
    name = f"{op.__name__} of {operands[0].dtype}{shapes}"
    try:
        found = np.asarray(jax.jit(op)(*operands))
    except Exception as error:  # After any error, the other ops are still run.
        yield f"failed: {name}: {type(error).__name__}: {error}"
        return
    if not np.array_equal(found, wanted.astype(found.dtype)):
        yield f"wrong: {name}"


def chained():
    """Returns, by op, a shape-preserving function of an array, and an array."""
    w = jnp.asarray(draw(0, (SIDE, SIDE)), jnp.bfloat16)
    bias, main_grad = w[0], jnp.zeros((SIDE, SIDE), jnp.float32)
    return {
        "linear": (lambda x: ub.linear(x, w), w),
        "linear with bias": (lambda x: ub.linear(x, w, bias), w),
        "dgrad_add": (lambda residual: ub.dgrad_add(w, w, residual), w),
        "wgrad_accumulate": (lambda grad: ub.wgrad_accumulate(w, w, grad), main_grad),
        **{
            f"{op.__name__} over one rank": (functools.partial(alone(op), w=w), w)
            for op in COMMUNICATING
        },
    }


def host_time_us(step, start):
    """Returns an upper bound of the host time of a call.

    Alternates programs of many calls and of one call. Measures until the end of the
    program, since XLA may run it on another thread. While the host enqueues a call, the
    GPU runs the previous one, for a few microseconds.
    """

    def chain(length):
        def program(value):
            for _ in range(length):
                value = step(value)
            return value

        return jax.jit(program)

    programs = {length: chain(length) for length in (1, CHAIN)}
    times = {length: [] for length in programs}
    for _ in range(30):
        for length, program in programs.items():
            jax.block_until_ready(start)
            begin = time.perf_counter()
            # Freed before the next run, which then gets this memory and is replayed.
            jax.block_until_ready(program(start))
            times[length].append(time.perf_counter() - begin)
    many, one = (statistics.median(times[length][10:]) for length in (CHAIN, 1))
    return (many - one) / (CHAIN - 1) * 1e6


def draw(seed, shape):
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
