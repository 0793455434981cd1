"""Meshes of this machine's devices, and programs on them, for the commands."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.parallel import OVERLAPPED
from jax_ub._src.runtime import backend, settings
from jax_ub._src.tools.timing import Timer

AXIS = "tp"
Spec = PartitionSpec
ROWS, COLUMNS = Spec(AXIS), Spec(None, AXIS)
_SPECS = {(True, False): ROWS, (False, True): COLUMNS, (False, False): Spec()}
# Shardings of x [M, K], w [K, N] and the result [M, N] of each forward op.
FORWARD_SPECS = {
    op: ((_SPECS[mode.x], _SPECS[mode.kernel]), _SPECS[mode.y])
    for op, mode in OVERLAPPED.items()
}


def start(
    command: str,
    num_devices: int,
    platform: str | None = None,
    *,
    requests_cpus: bool = True,
) -> None:
    """Starts the JAX backend and checks that it has at least `num_devices` devices.

    `platform` None keeps JAX's default. If `requests_cpus`, it requests the CPU devices
    from JAX, which works only before JAX has started. The launcher has set the number
    in the processes of a job.
    """
    settings.check()
    settings.set_pool_threads(num_devices)
    # oneDNN's OpenMP threads must sleep between calls. Otherwise they would spin on the
    # cores while the next program is timed.
    settings.ask_openmp_to_sleep()
    if platform is not None:
        # This has no effect if JAX has started already. The number of devices is
        # checked below.
        jax.config.update("jax_platforms", platform)
    if requests_cpus:
        backend.request_cpu_devices(num_devices)
    num_found = len(backend.start())
    if num_found < num_devices:
        raise UnsupportedOverlapError(
            f"{command}: P = {num_devices} needs as many devices, but jax has "
            f"{num_found}. Use fewer ranks; on CPUs, run the command in a new process: "
            f"python -m jax_ub {command}."
        )


@dataclasses.dataclass(frozen=True)
class Ranks(Timer):
    """A 1D mesh of the first `num_ranks` local devices. Times programs on them."""

    num_ranks: int

    @property
    def devices(self) -> list[jax.Device]:
        return jax.local_devices()[: self.num_ranks]

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Shards a host array, which is equal in all processes, over the mesh."""
        array = np.asarray(array)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def draw(
        self, dtype: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[Spec]
    ) -> list[jax.Array]:
        drawn = (normal(seed, shape, dtype) for seed, shape in enumerate(shapes))
        return [self.place(x, spec) for x, spec in zip(drawn, specs, strict=True)]

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[PartitionSpec],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Jits `jax.shard_map` of a per-device function over the mesh.

        `donate` has the indices of the operands that are donated.
        """
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped, donate_argnums=donate)


class ProcessRanks(Ranks):
    """A 1D mesh of `num_ranks` devices, equally many from each process of a job."""

    @property
    def devices(self) -> list[jax.Device]:
        num_processes = jax.process_count()
        num_local = self.num_ranks // num_processes
        return [
            device
            for process in range(num_processes)
            for device in jax.local_devices(process)[:num_local]
        ]


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Returns normally distributed random numbers, times `scale`, as a NumPy array."""
    try:
        return _drawn(seed, shape, np.dtype(dtype), scale).copy()
    except MemoryError as error:
        raise UnsupportedOverlapError(
            f"an operand of shape {list(shape)} does not fit into this machine's "
            "memory. Take smaller sizes."
        ) from error


# The results are cached, because drawing 8192 x 8192 numbers takes seconds, and all
# programs of a benchmark case use the same operands.
@functools.lru_cache(maxsize=8)
def _drawn(seed, shape, dtype, scale):
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (draws * np.float32(scale)).astype(dtype)
