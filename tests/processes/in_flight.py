"""A process that closes its groups while its programs wait for peers.

    python -m jax_ub launch -n 2 --devices-per-process 2 tests/processes/in_flight.py

`test_lifetimes.py` launches it. Process 1 launches programs before process 0 does, and
does not wait for their results before it calls `destroy_ub` or exits. Process 0 needs
its part of them.
"""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub

LATE_S = 1.0  # time from the launches of process 1 to those of process 0
ROWS, WIDTH = 16, 16  # of a rank


class Program:
    """An op and a GEMM of XLA on a mesh. XLA runs it while Python continues."""

    def __init__(self, mesh):
        self.num_ranks = mesh.size
        ub.initialize_ub((ROWS * mesh.size, WIDTH), mesh.size, mesh=mesh)
        x = np.random.default_rng(0).integers(-1, 2, (ROWS * mesh.size, WIDTH))
        sharding = NamedSharding(mesh, P("tp"))
        self.x = x.astype(np.float32)
        self.sharded = jax.make_array_from_callback(
            x.shape, sharding, self.x.__getitem__
        )

        def on_device(x):
            # XLA runs a program of one device inside the launch if its GEMMs are tiny.
            return ub.matmul_all_reduce(x @ x.T, x, axis_name="tp", method="direct")

        self.run = jax.jit(
            jax.shard_map(on_device, mesh=mesh, in_specs=P("tp"), out_specs=P())
        )

    def check(self, result):
        parts = np.split(self.x, self.num_ranks)
        expected = sum(part @ part.T @ part for part in parts)
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected)


def launch(mesh):
    program = Program(mesh)
    program.check(program.run(program.sharded))
    multihost_utils.sync_global_devices("compiled")
    if jax.process_index() == 0:
        time.sleep(LATE_S)
    begin = time.monotonic()
    results = [program.run(program.sharded) for _ in range(3)]
    if jax.process_index() == 0:
        for result in results:
            program.check(result)
    else:
        assert time.monotonic() - begin < LATE_S, "the launches waited for their calls"


def main():
    jax.distributed.initialize()
    everyone = Mesh(np.array(jax.devices()), ("tp",))
    one_each = Mesh(np.array([jax.local_devices(p)[1] for p in range(2)]), ("tp",))
    launch(one_each)
    ub.destroy_ub()
    jax.set_mesh(everyone)  # must not affect the programs that destroy_ub launches
    launch(everyone)
    ub.destroy_ub()
    launch(everyone)
    print("done", flush=True)


if __name__ == "__main__":
    main()
