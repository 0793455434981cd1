"""Ranks of mpirun that find each other by MPI; `test_mpi.py` starts them."""

import contextlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub

X = np.random.default_rng(0).integers(-2, 3, (24, 6)).astype(np.float32)
W = np.random.default_rng(1).integers(-2, 3, (6, 36)).astype(np.float32)


def initialize(mesh, rows):
    ub.initialize_ub(
        (rows, 6), mesh.size, bootstrap_backend="mpi", mesh=mesh, axis_name="tp"
    )


def multiply(mesh):
    def product(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", method="ring_exchange")

    def put(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

    specs = (P("tp"), P(None, "tp"))
    program = jax.jit(
        jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    )
    for shard in program(put(X, P("tp")), put(W, P(None, "tp"))).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (X @ W)[shard.index])


def main():
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    # Makes JAX find the processes by MPI, and fails afterwards: there are more devices.
    with contextlib.suppress(ub.errors.ConfigurationError):
        ub.initialize_ub((1, 1), 1 << 20, bootstrap_backend="mpi")
    assert jax.process_count() > 1
    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    try:
        initialize(mesh, 24 if jax.process_index() else 48)
    except ub.errors.CommunicatorError as error:
        assert "(48, 6)" in str(error) and "(24, 6)" in str(error), error
    else:
        raise AssertionError("processes with different arguments found each other")
    for _ in range(2):
        initialize(mesh, 24)
        multiply(mesh)
        ub.destroy_ub()
    print("all right", flush=True)


main()
