"""The devices of a benchmark: one process, one mesh for each P over the same devices."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "tp"
Spec = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The first `num_ranks` devices as a mesh, and how programs and arrays get there."""

    num_ranks: int

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over axis `AXIS`."""
        return Mesh(np.array(jax.devices()[: self.num_ranks]), (AXIS,))

    def place(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Puts a global array on the mesh; always into new buffers."""
        return jax.device_put(np.asarray(array), NamedSharding(self.mesh, spec))

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[PartitionSpec],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        """Jits a per-device function over the mesh."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped, donate_argnums=donate)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Standard normal numbers times `scale`, rounded to `dtype`, on the host."""
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (draws * np.float32(scale)).astype(dtype)
