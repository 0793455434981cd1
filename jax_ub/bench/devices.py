"""The devices of a benchmark: one process, one mesh for each P."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub.errors import UnsupportedOverlapError
from jax_ub.runtime import backend, settings

AXIS = "tp"
Spec = PartitionSpec


def start(num_devices: int, platform: str | None = "cpu") -> None:
    """Sees that this process has that many devices, on CPUs as many as are asked for.

    Unless it was set up with as many, jax must not have computed yet.

    Args:
        num_devices: how many.
        platform: what jax is to run on; None leaves it to jax.

    Raises:
        UnsupportedOverlapError: if jax has fewer devices, has started already, or
            does not start.
    """
    # jaxlib needs two threads a device where launches pile up. oneDNN's OpenMP would
    # spin on the cores while the next candidate runs.
    settings.set_pool_threads(4 * num_devices)
    settings.ask_openmp_to_sleep()
    try:
        if platform is not None:
            jax.config.update("jax_platforms", platform)
        if getattr(jax.config, "jax_num_cpu_devices", 0) < num_devices:
            jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        pass  # It has started: with enough of them, perhaps.
    num_found = len(backend.start())
    if num_found < num_devices:
        raise UnsupportedOverlapError(
            f"bench: jax runs with {num_found} devices, and P = {num_devices} was "
            "asked for. Ask for fewer; on CPUs, start the benchmark in a process of "
            "its own: python -m jax_ub bench."
        )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The first `num_ranks` devices as a mesh; puts programs and arrays there."""

    num_ranks: int

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over axis `AXIS`."""
        return Mesh(np.array(jax.devices()[: self.num_ranks]), (AXIS,))

    @property
    def platform(self) -> str:
        """Of the devices: "cpu" or "gpu"."""
        return self.mesh.devices.flat[0].platform

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Puts a global array on the mesh; always into new buffers."""
        return jax.device_put(np.asarray(array), NamedSharding(self.mesh, spec))

    def draw(
        self, dtype: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[Spec]
    ) -> list[jax.Array]:
        """Puts standard normal operands of the given global shapes on the mesh."""
        drawn = (normal(seed, shape, dtype) for seed, shape in enumerate(shapes))
        return [self.place(x, spec) for x, spec in zip(drawn, specs, strict=True)]

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[PartitionSpec],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Jits a per-device function over the mesh."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped, donate_argnums=donate)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Standard normal numbers times `scale`, rounded to `dtype`, on the host."""
    return _drawn(seed, shape, np.dtype(dtype), scale).copy()


# Every candidate of a case has operands of its own, of the same numbers: to draw those
# of 8192 cubed takes seconds.
@functools.lru_cache(maxsize=8)
def _drawn(seed, shape, dtype, scale):
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (draws * np.float32(scale)).astype(dtype)
