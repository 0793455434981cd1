"""Every local op on one GPU, exactly, and what a call costs the host.

    python tests/gpu/local.py [--short]

Operands are small integers, so that the reference of `jax.lax` must agree to the bit.
Also runs on a CPU, where the same programs must be right.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_ub as ub

SIZES = ((1, 1, 1), (7, 5, 3), (64, 128, 96), (257, 130, 65), (512, 1024, 256))
DTYPES = ("bfloat16", "float32", "float16")
CHAIN = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    for dtype in DTYPES[: 1 if short else None]:
        for M, K, N in SIZES[1 : 3 if short else None]:
            check(jnp.dtype(dtype), M, K, N)
    print(f"all right on {jax.devices()[0].device_kind}", flush=True)
    if not short:
        print(f"host time of a call in a program of {CHAIN}: {host_time_us():.2f} us")


def check(dtype, M, K, N):
    x, w, dy, residual = (
        draw(seed, shape).astype(dtype)
        for seed, shape in enumerate([(2, M, K), (K, N), (2, M, N), (2, M, K)])
    )
    main_grad = draw(4, (K, N))
    bias = draw(5, (N,)).astype(dtype)
    rows, columns = x.reshape(-1, K), dy.reshape(-1, N)
    wide = jnp.float32
    compare("linear", jax.jit(ub.linear)(x, w, bias), product(x, w) + bias.astype(wide))
    compare(
        "dgrad_add",
        jax.jit(ub.dgrad_add)(dy, w, residual),
        product(dy, w.T) + residual.astype(wide),
    )
    compare(
        "wgrad_accumulate",
        jax.jit(ub.wgrad_accumulate)(x, dy, main_grad),
        main_grad + product(rows.T, columns),
    )


def product(a, b):
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def compare(op, found, wanted):
    wanted = np.asarray(wanted.astype(found.dtype).astype(jnp.float32))
    if not np.array_equal(np.asarray(found.astype(jnp.float32)), wanted):
        sys.exit(f"wrong: {op} of {found.dtype}{list(found.shape)}")


def host_time_us():
    """What enqueueing one more call costs: of programs of many and of one, in turns."""
    w = draw(0, (128, 128)).astype(jnp.bfloat16)

    def chain(length):
        def program(residual):
            for _ in range(length):
                residual = ub.dgrad_add(w, w, residual)
            return residual

        return jax.jit(program)

    programs = {length: chain(length) for length in (1, CHAIN)}
    times = {length: [] for length in programs}
    for _ in range(30):
        for length, program in programs.items():
            jax.block_until_ready(w)
            begin = time.perf_counter()
            result = program(w)
            times[length].append(time.perf_counter() - begin)
            jax.block_until_ready(result)
            # The next run finds the same memory free, and is replayed.
            result = None
    many, one = (statistics.median(times[length][10:]) for length in (CHAIN, 1))
    return (many - one) / (CHAIN - 1) * 1e6


def draw(seed, shape):
    numbers = np.random.default_rng(seed).integers(-1, 2, shape)
    return jnp.asarray(numbers.astype(np.float32))


if __name__ == "__main__":
    main()
