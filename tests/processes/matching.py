"""Programs whose calls could be confused; `test_matching.py` launches it.

Every call has different operands and is compared exactly, which detects a call that is
matched with a different call of the other process.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub

X = np.random.default_rng(0).integers(-2, 3, (8, 6)).astype(np.float32)
W = np.random.default_rng(1).integers(-2, 3, (6, 8)).astype(np.float32)


def put(array, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def assert_shards(array, expected):
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def on_mesh(function, mesh, out_specs):
    specs = (P("tp"), P(None, "tp"))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs)
    )


def product(x, w):
    return ub.all_gather_matmul(x, w, axis_name="tp", method="direct")


def many_independent_calls_in_many_launches(mesh, x, w):
    """Runs 24 calls per program, which XLA may reorder, and 40 launches at a time."""

    def calls(x, w):
        return [product((i + 1) * x, w) for i in range(24)]

    program = on_mesh(calls, mesh, [P(None, "tp")] * 24)
    launches = [program(put(X + k, mesh, P("tp")), w) for k in range(40)]
    for k, results in enumerate(launches):
        for i, result in enumerate(results):
            assert_shards(result, (i + 1) * (X + k) @ W)


def one_inner_jit_at_six_places(mesh, x, w):
    """Runs six call sites of one channel, some in a loop and in branches."""
    layer = jax.jit(product)

    def calls(x, w):
        def body(scale, _):
            return scale + 1, layer(scale * x, w)

        _, loop = jax.lax.scan(body, jnp.float32(1), None, length=5)
        few = w.shape[0] < 3
        branch = jax.lax.cond(few, lambda: layer(7 * x, w), lambda: layer(8 * x, w))
        return layer(x, w), layer(2 * x, w), layer(3 * x, w), branch, loop

    cut = P(None, "tp")
    program = on_mesh(calls, mesh, (cut, cut, cut, cut, P(None, *cut)))
    for launch in [program(x, w) for _ in range(10)]:
        *single, loop = launch
        for scale, result in zip((1, 2, 3, 8), single, strict=True):
            assert_shards(result, scale * (X @ W))
        assert_shards(loop, np.stack([scale * (X @ W) for scale in range(1, 6)]))


def one_process_compiles_more_than_the_other(mesh, x, w):
    """Analyzes the cost of a program in one process only."""
    for scale in (1, 2):

        def call(x, w, scale=scale):
            return product(scale * x, w), product(x, w)

        if jax.process_index() == 0:
            lowered = on_mesh(call, mesh, (P(None, "tp"),) * 2).lower(x, w)
            lowered.compile().cost_analysis()
        program = on_mesh(call, mesh, (P(None, "tp"),) * 2)
        for scaled, plain in [program(x, w) for _ in range(5)]:
            assert_shards(scaled, scale * (X @ W))
            assert_shards(plain, X @ W)


def programs_of_one_name(mesh, x, w):
    """Alternates two programs with the same name, shapes and channels."""
    one = on_mesh(lambda x, w: product(x, w), mesh, P(None, "tp"))
    other = on_mesh(lambda x, w: product(5 * x, w), mesh, P(None, "tp"))
    launches = [(one(x, w), other(x, w)) for _ in range(20)]
    for first, second in launches:
        assert_shards(first, X @ W)
        assert_shards(second, 5 * (X @ W))


def main():
    only_process, cache = sys.argv[1:] if sys.argv[1:] else ("-1", "")
    if int(only_process) == int(os.environ["SLURM_PROCID"]):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    ub.initialize_ub((8, 8), len(jax.devices()), dtype=jnp.float32, mesh=mesh)
    x, w = put(X, mesh, P("tp")), put(W, mesh, P(None, "tp"))
    many_independent_calls_in_many_launches(mesh, x, w)
    one_inner_jit_at_six_places(mesh, x, w)
    one_process_compiles_more_than_the_other(mesh, x, w)
    programs_of_one_name(mesh, x, w)
    assert not ub.fallbacks()
    ub.destroy_ub()
    print("all matched", flush=True)


if __name__ == "__main__":
    main()
