"""Random sequences of create, call, change shape and destroy, in several processes.

    python -m jax_ub launch -n 3 --devices-per-process 4 \
        tests/processes/soak.py --minutes 10

Operands are small integers, so every number of every result is checked for equality.
Every sequence has a seed; one that failed is run again with `--seed S --sequences 1`.
"""

import argparse
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub

AXES = ("tp", "mp")  # two groups of ranks may exist at a time
METHODS = (None, "direct", "ring_exchange", "pipeline", "external")
DTYPES = ("float32", "bfloat16", "float16")
CAPACITY = (256, 64)


def column(x, w, **options):
    return ub.all_gather_matmul(x, w, **options)


def row(x, w, **options):
    return ub.matmul_reduce_scatter(x, w, **options)


def summed(x, w, **options):
    return ub.matmul_all_reduce(x, w, **options)


# The op, and how x, w and y are sharded over the axis.
OPS = {
    "column": (column, (("A", None), (None, "A"), (None, "A"))),
    "row": (row, ((None, "A"), ("A", None), ("A", None))),
    "summed": (summed, ((None, "A"), ("A", None), (None, None))),
}


class Group:
    """Initializes a mesh of one axis, with some devices of every process."""

    def __init__(self, axis, rng, others):
        self.axis = axis
        ids = [other.mesh.device_ids.tolist() for other in others]
        devices = self.draw(rng)
        while [device.id for device in devices] in ids:  # one group has one axis
            devices = self.draw(rng)
        self.num_ranks = len(devices)
        self.mesh = Mesh(devices, (axis,))
        ub.initialize_ub(CAPACITY, self.num_ranks, mesh=self.mesh, axis_name=axis)

    def draw(self, rng):
        num_processes = jax.process_count()
        per_process = rng.integers(1, jax.local_device_count() + 1, num_processes)
        devices = [
            device
            for process, count in enumerate(per_process)
            for device in jax.local_devices(process)[:count]
        ]
        return rng.permutation(np.array(devices))

    def sharded(self, values, spec):
        names = P(*(self.axis if name == "A" else None for name in spec))
        sharding = NamedSharding(self.mesh, names)
        array = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
        return array, names


class Sequence:
    """Runs the sequence of a seed, which is the same in every process."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.groups: dict[str, Group] = {}
        self.num_calls = 0

    def run(self):
        for _ in range(self.rng.integers(3, 12)):
            axis = AXES[self.rng.integers(len(AXES))]
            if axis not in self.groups:
                others = list(self.groups.values())
                self.groups[axis] = Group(axis, self.rng, others)
            self.call(self.groups[axis])
            if self.rng.random() < 0.3:
                del self.groups[axis]
                ub.destroy_ub(axis)
        ub.destroy_ub()

    def call(self, group):
        """Runs one op, forward and backward, a few times without waiting."""
        name = list(OPS)[self.rng.integers(len(OPS))]
        function, specs = OPS[name]
        method = METHODS[self.rng.integers(len(METHODS))]
        dtype = DTYPES[self.rng.integers(len(DTYPES))]
        num_rows, k, n = self.shape(group)
        values = self.integers((num_rows, k), dtype), self.integers((k, n), dtype)
        dy = self.integers((num_rows, n), dtype)
        (x, x_spec), (w, w_spec) = map(group.sharded, values, specs)
        dy, y_spec = group.sharded(dy, specs[2])

        def on_device(x, w):
            return function(x, w, axis_name=group.axis, method=method)

        layer = jax.shard_map(
            on_device, mesh=group.mesh, in_specs=(x_spec, w_spec), out_specs=y_spec
        )

        @jax.jit
        def step(x, w, dy):
            y, pull = jax.vjp(layer, x, w)
            return y, *pull(dy)

        results = [step(x, w, dy) for _ in range(self.rng.integers(1, 20))]
        expected = plain(*values, np.asarray(self.last, np.float32))
        what = f"{name} {method} {dtype} {num_rows}x{k}x{n} on {group.num_ranks}"
        with ub.errors.raised():
            jax.block_until_ready(results)
        for result in results:
            check(result, expected, what)
        self.num_calls += len(results)

    def shape(self, group):
        size = lambda limit: int(self.rng.integers(1, limit)) * group.num_ranks  # noqa: E731
        return size(5), size(4), size(4)

    def integers(self, shape, dtype):
        self.last = self.rng.integers(-1, 2, shape)
        return np.asarray(jnp.asarray(self.last, dtype))


def plain(x, w, dy):
    x, w = (np.asarray(a, np.float32) for a in (x, w))
    return x @ w, dy @ w.T, x.T @ dy


def check(found, expected, what):
    for name, array, wanted in zip(("y", "dx", "dw"), found, expected, strict=True):
        for shard in array.addressable_shards:
            got = np.asarray(shard.data, np.float32)
            np.testing.assert_array_equal(
                got, wanted[shard.index], err_msg=f"{name} of {what}"
            )


def held():
    """Returns the number of open descriptors, and megabytes of memory."""
    status = pathlib.Path("/proc/self/status").read_text()
    resident = status.split("VmRSS:")[1].split()[0]
    return len(os.listdir("/proc/self/fd")), int(resident) >> 10


def agreed(value):
    """Broadcasts a value of process 0 to all processes."""
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first sequence")
    parser.add_argument("--sequences", type=int, default=1 << 30)
    flags = parser.parse_args()
    jax.distributed.initialize()
    first = agreed(time.time_ns() % 10**6 if flags.seed is None else flags.seed)
    end = time.monotonic() + 60 * flags.minutes
    for seed in range(first, first + flags.sequences):
        if not agreed(time.monotonic() < end):
            break
        if jax.process_index() == 0:
            print(f"seed {seed}", end=" ", flush=True)
        sequence = Sequence(seed)
        sequence.run()
        jax.clear_caches()
        descriptors, megabytes = held()
        if jax.process_index() == 0:
            print(
                f"passed: {sequence.num_calls} calls; holds {descriptors} descriptors, "
                f"{megabytes} MB",
                flush=True,
            )
    print("done", flush=True)


if __name__ == "__main__":
    main()
