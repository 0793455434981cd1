"""Calls of more ranks than the tests have devices, in a separate program."""

import os
import subprocess
import sys

import pytest
from covering import nightly

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import PartitionSpec as S
import jax_ub as ub

P = int(sys.argv[1])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", P)
mesh = jax.make_mesh((P,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
integers = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
x, w, dy = integers(2 * P, 3 * P), integers(3 * P, 5 * P), integers(2 * P, 5 * P)
ops = {
    ub.all_gather_matmul: (S("tp"), S(None, "tp"), S(None, "tp")),
    ub.matmul_reduce_scatter: (S(None, "tp"), S("tp"), S("tp")),
    ub.matmul_all_reduce: (S(None, "tp"), S("tp"), S()),
}
for op, (*of_operands, of_result) in ops.items():
    for method in ("direct", "ring_exchange", "pipeline", "external"):
        product = jax.shard_map(
            lambda x, w: op(x, w, axis_name="tp", method=method),
            mesh=mesh, in_specs=tuple(of_operands), out_specs=of_result)
        y, vjp = jax.vjp(jax.jit(product), x, w)
        dx, dw = vjp(dy)
        np.testing.assert_array_equal(y, x @ w)
        np.testing.assert_array_equal(dx, dy @ w.T)
        np.testing.assert_array_equal(dw, x.T @ dy)
assert not ub.fallbacks(), ub.fallbacks()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [17, *nightly(32)])
def test_every_op_and_its_gradients_are_exact(num_ranks):
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(num_ranks)],
        check=True,
        env={**os.environ, "NPROC": str(4 * num_ranks)},
    )
