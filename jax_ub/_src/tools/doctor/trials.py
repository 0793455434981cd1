"""Runs a small call with each method, and compares its result with numpy's."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives.bulk_all_gather import bulk_all_gather
from jax_ub._src.rules.all_gather_matmul import all_gather_matmul
from jax_ub._src.runtime import cuda_engine, settings
from jax_ub._src.tools.doctor.finding import Finding, State

# The smallest number of devices with communication.
_TRIAL_DEVICES = 2
# Mesh axis of the trials. It must differ from the axes of user programs, which
# `initialize_ub` may have configured.
AXIS = "doctor"
# Threads per device for jaxlib's pool. It needs two per device and blocks some itself.
POOL_THREADS_EACH = 4


def start_devices() -> None:
    """Requests two CPU devices from JAX for the trials, unless JAX has started."""
    if getattr(jax.config, "jax_num_cpu_devices", 0) > 0:
        return
    settings.set_pool_threads(POOL_THREADS_EACH * _TRIAL_DEVICES)
    # If JAX has already started, its number of devices cannot be changed.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", _TRIAL_DEVICES)


def mesh_of(together: bool) -> Mesh:
    """Returns the mesh for the trials, with the single axis `AXIS`.

    It has two devices of this process, or if `together` all devices of the job.
    """
    devices = jax.devices() if together else jax.local_devices()[:_TRIAL_DEVICES]
    return Mesh(np.array(devices), (AXIS,))


def methods_on(mesh: Mesh) -> Iterator[Finding]:
    """Runs a small AG+GEMM on the mesh with each method, and yields the findings."""
    for method in Method:
        yield _trial(mesh, method)


def _trial(mesh: Mesh, method: Method) -> Finding:
    """Runs one small AG+GEMM with `method`, and compares it with numpy's product.

    Returns a finding that says whether the method runs and its result is right.
    """
    name = f'method "{method.value}"'
    x = np.ones((8 * mesh.size, 16), np.float32)
    w = np.ones((16, 8 * mesh.size), np.float32)
    try:
        y = _column_linear(mesh, method)(x, w)
        mine = [(np.asarray(part.data), part.index) for part in y.addressable_shards]
    except Exception as error:  # any error is a finding
        state = _state_of(method, mesh.local_devices)
        return Finding(name, state, f"{type(error).__name__}: {error}")
    if not all(np.array_equal(part, (x @ w)[index]) for part, index in mine):
        return Finding(name, State.FAULT, "runs, but its numbers are wrong")
    return Finding(name, State.FINE, f"runs on {mesh.size} devices")


def _column_linear(mesh, method):
    spec = PartitionSpec
    function = functools.partial(all_gather_matmul, axis_name=AXIS, method=method)
    if method is Method.BULK:
        function = functools.partial(_beside_a_gather, mesh.size)
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(spec(AXIS, None), spec(None, AXIS)),
            out_specs=spec(None, AXIS),
        )
    )


def _beside_a_gather(num_ranks, x, w):
    """Computes `all_gather(x) @ w` with method "bulk", for the trial of that method.

    It gathers x concurrently with an independent GEMM, then multiplies by w.
    """
    dy = jnp.ones((num_ranks * x.shape[0], w.shape[1]), x.dtype)
    _, gathered = bulk_all_gather(
        (dy,),
        (w,),
        x,
        axis_name=(AXIS,),
        num_ranks=num_ranks,
        choice=MethodChoice(Method.BULK),
        label="doctor",
    )
    return gathered @ w


def _state_of(method, devices):
    """Returns how severe it is that a method's trial failed on these devices.

    It is FAULT if the method should run on them, else NOTE.
    """
    platform = cuda_engine.platform_of(devices[0])
    if platform == "cuda":
        expected = method is not Method.DIRECT and cuda_engine.why_not() is None
    else:
        expected = platform == "cpu"
    return State.FAULT if expected else State.NOTE
