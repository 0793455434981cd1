"""Run by test_communicators.py: two processes on different hosts, by `--hosts 2`."""

import sys

import jax
import numpy as np
from jax import P
from jax.sharding import Mesh

import jax_ub as ub
from jax_ub._src.runtime import communicators
from jax_ub._src.tools import doctor

jax.distributed.initialize()
DEVICES = np.array(jax.devices())
REASON = "its ranks span the hosts"


def gathered(mesh, **options):
    """Computes AG+GEMM of ones; returns the distinct values in local shards."""

    def call(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", **options)

    specs = (P("tp"), P(None, "tp"))
    run = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=specs[1]))
    ones = np.ones((8, 8), np.float32)
    x, w = (
        jax.make_array_from_callback(
            (8, 8), jax.NamedSharding(mesh, spec), lambda i: ones[i]
        )
        for spec in specs
    )
    return {float(shard.data.min()) for shard in run(x, w).addressable_shards}


whole = Mesh(DEVICES, ("tp",))
ub.initialize_ub((8, 8), 4, mesh=whole)
(connection,) = communicators.connections()
assert REASON in connection.reason, connection
assert f"buffers: none: {REASON}" in str(ub.memory_report())
assert gathered(whole) == {8.0}
assert REASON in ub.fallbacks()[-1].reason, ub.fallbacks()
# A name without configuration requests no method: its layers run over hosts, too.
assert gathered(whole, ub_name="qkv") == {8.0}
assert "qkv" in ub.fallbacks()[-1].label, ub.fallbacks()
assert REASON in ub.fallbacks()[-1].reason, ub.fallbacks()


def refused(**options):
    try:
        gathered(whole, **options)
    except ub.errors.UnsupportedOverlapError as error:
        return REASON in str(error)
    return False


assert refused(method="direct")
found = {finding.name: finding for finding in doctor.examine()}
assert REASON in found["fallback"].text
assert REASON in found[f"devices {[device.id for device in DEVICES]}"].text
ub.destroy_ub()

ub.initialize_ub(
    (8, 8), 4, mesh=whole, ub_cfgs={"qkv_fprop": {"method": "ring_exchange"}}
)
assert refused(ub_name="qkv")
ub.destroy_ub()

# With tensor parallelism inside a host and data parallelism between hosts, no group
# spans hosts.
inside = Mesh(DEVICES.reshape(2, 2), ("dp", "tp"))
ub.initialize_ub((8, 8), 2, mesh=inside)
assert not communicators.connections()
assert gathered(inside, method="direct") == {8.0}
sys.stdout.write("passed over_two_hosts\n")
