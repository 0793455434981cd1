"""Starts JAX for a benchmark in one process, and creates its meshes and operands."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.runtime import backend, settings

AXIS = "tp"
Spec = PartitionSpec


def start(num_devices: int, platform: str | None = "cpu") -> None:
    """Starts the JAX backend and checks that it has at least `num_devices` devices.

    On CPUs, it requests this number from JAX, which works only before JAX has started.

    Args:
        num_devices: the minimum number of devices.
        platform: the platform to select; None keeps JAX's default.

    Raises:
        UnsupportedOverlapError: if JAX has fewer devices, for example because
            it had started before, or if it does not start.
    """
    # jaxlib needs at least two pool threads per device when launches are queued.
    # oneDNN's OpenMP threads must sleep between calls. Otherwise they would spin on the
    # cores while the next candidate is timed.
    settings.set_pool_threads(4 * num_devices)
    settings.ask_openmp_to_sleep()
    try:
        if platform is not None:
            jax.config.update("jax_platforms", platform)
        if getattr(jax.config, "jax_num_cpu_devices", 0) < num_devices:
            jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        pass  # JAX has already started; the number of devices is checked below.
    num_found = len(backend.start())
    if num_found < num_devices:
        raise UnsupportedOverlapError(
            f"bench: jax runs with {num_found} devices, and P = {num_devices} was "
            "asked for. Ask for fewer; on CPUs, start the benchmark in a process of "
            "its own: python -m jax_ub bench."
        )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A mesh of the first `num_ranks` devices; places arrays and maps programs."""

    num_ranks: int

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Returns the mesh of the first `num_ranks` devices, with one axis, `AXIS`."""
        return Mesh(np.array(jax.devices()[: self.num_ranks]), (AXIS,))

    @property
    def platform(self) -> str:
        """Returns the platform of the devices, "cpu" or "gpu"."""
        return self.mesh.devices.flat[0].platform

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Copies a global array to new buffers on the mesh with sharding `spec`."""
        return jax.device_put(np.asarray(array), NamedSharding(self.mesh, spec))

    def draw(
        self, dtype: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[Spec]
    ) -> list[jax.Array]:
        """Returns operands with random normal values, placed on the mesh.

        `shapes` are the global shapes and `specs` the shardings.
        """
        drawn = (normal(seed, shape, dtype) for seed, shape in enumerate(shapes))
        return [self.place(x, spec) for x, spec in zip(drawn, specs, strict=True)]

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[PartitionSpec],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Maps a per-device function over the mesh with `jax.shard_map`, and jits it.

        `donate` lists the indices of donated arguments, as
        `jax.jit(donate_argnums=...)` does.
        """
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped, donate_argnums=donate)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Returns a new host array of normal random numbers times `scale`, in `dtype`.

    Equal arguments return equal arrays.
    """
    return _drawn(seed, shape, np.dtype(dtype), scale).copy()


# The candidates of a case use separate copies of the same operands. Drawing an operand
# of size 8192 x 8192 takes seconds, so it is cached.
@functools.lru_cache(maxsize=8)
def _drawn(seed, shape, dtype, scale):
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (draws * np.float32(scale)).astype(dtype)
