"""Checks the wheel that is installed: `python smoke.py METHOD`.

Runs the doctor, and all-gather + GEMM and GEMM + reduce-scatter on four CPU devices.
Method "direct" needs the engine; "auto" must fall back, as in the pure-Python wheel.
"""

import importlib.util
import os
import subprocess
import sys

os.environ["NPROC"] = "16"  # threads of XLA's pool: at least 4 per device

import jax
import numpy as np
from jax import P

import jax_ub as ub

_METHOD = sys.argv[1]

subprocess.run([sys.executable, "-m", "jax_ub", "doctor"], check=True)
if importlib.util.find_spec("jax_ub._cuda"):
    import jax_ub._cuda

jax.config.update("jax_num_cpu_devices", 4)
jax.set_mesh(jax.make_mesh((4,), ("tp",)))


_SPECS = P("tp"), P(None, "tp"), P("tp")


@jax.jit
@jax.shard_map(in_specs=_SPECS, out_specs=(P(None, "tp"), P("tp")))
def mlp(x, w_up, w_down):
    """Returns the intermediate and the final result."""
    h = ub.all_gather_matmul(x, w_up, axis_name="tp", method=_METHOD)
    return h, ub.matmul_reduce_scatter(h, w_down, axis_name="tp", method=_METHOD)


# Small integers, for which all sums are exact.
random = np.random.default_rng(0)
x, w_up, w_down = (
    random.integers(-1, 2, shape).astype(np.float32)
    for shape in ((64, 32), (32, 48), (48, 16))
)
h, y = mlp(*jax.device_put((x, w_up, w_down), _SPECS))
np.testing.assert_array_equal(h, x @ w_up)
np.testing.assert_array_equal(y, x @ w_up @ w_down)
assert bool(ub.fallbacks()) == (_METHOD == "auto"), ub.fallbacks()
