"""Creates and destroys communicators repeatedly; a test launches it."""

import json
import os
import pathlib
import sys

import jax
import numpy as np
from faults import Job, left
from jax.sharding import Mesh

import jax_ub as ub


def resident_mb():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main():
    num_cycles, warm_up = int(sys.argv[1]), int(sys.argv[1]) // 4
    jax.distributed.initialize()
    job = Job("direct")
    job.initialize()
    job.call()
    ub.destroy_ub()
    for cycle in range(num_cycles):
        if cycle == warm_up:
            before = left(), len(os.listdir("/proc/self/fd")), resident_mb()
        # A different device order each time, so that no earlier state is reused.
        devices = np.roll(np.array(jax.devices()), cycle)
        job.mesh = Mesh(devices, ("tp",))
        job.initialize()
        if cycle % 50 == 0:
            jax.clear_caches()
            job.program = jax.jit(job.pair)
            job.call()
        ub.destroy_ub()
    after = left(), len(os.listdir("/proc/self/fd")), resident_mb()
    print(json.dumps({"before": before, "after": after}), flush=True)


if __name__ == "__main__":
    main()
