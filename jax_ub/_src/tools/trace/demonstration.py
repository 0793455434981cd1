"""Runs a single op to be traced, without a user's program: `trace --op ...`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.rules.all_gather_matmul import all_gather_matmul
from jax_ub._src.rules.matmul_all_reduce import matmul_all_reduce
from jax_ub._src.rules.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub._src.runtime import backend
from jax_ub._src.runtime.initialize import initialize_ub

_AXIS = "tp"
_WARM = 2

_Spec = PartitionSpec
_ROWS, _COLUMNS = _Spec(_AXIS), _Spec(None, _AXIS)
# By op: its function and the shardings of x [M, K], w [K, N] and the result [M, N].
_OPS: dict[str, tuple[Callable[..., Any], tuple[_Spec, _Spec], _Spec]] = {
    "all_gather_matmul": (all_gather_matmul, (_ROWS, _COLUMNS), _COLUMNS),
    "matmul_reduce_scatter": (matmul_reduce_scatter, (_COLUMNS, _ROWS), _ROWS),
    "matmul_all_reduce": (matmul_all_reduce, (_COLUMNS, _ROWS), _Spec()),
}
OPS = tuple(_OPS)


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A single op with random operands that `trace --op` runs on several devices."""

    op: str
    method: str
    num_ranks: int
    M: int
    K: int
    N: int
    dtype: str
    repeats: int

    def prepare(self) -> Callable[[], None]:
        """Compiles the op, warms it up, and returns a function that repeats it.

        The function runs the op `repeats` times and waits for each result.
        """
        function, in_specs, out_spec = _OPS[self.op]
        mesh = Mesh(np.array(self._devices()), (_AXIS,))
        if jax.process_count() > 1:
            capacity = (self.M, max(self.K, self.N))
            initialize_ub(capacity, self.num_ranks, mesh=mesh, axis_name=_AXIS)

        def program(x, w):
            return function(x, w, axis_name=_AXIS, method=self.method)

        run = jax.jit(
            jax.shard_map(program, mesh=mesh, in_specs=in_specs, out_specs=out_spec)
        )
        shapes = ((self.M, self.K), (self.K, self.N))
        operands = [
            self._place(shape, NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, in_specs, strict=True)
        ]

        def repeat(times=self.repeats):
            for _ in range(times):
                jax.block_until_ready(run(*operands))

        repeat(_WARM)
        return repeat

    def _devices(self):
        devices = backend.start()
        if len(devices) < self.num_ranks:
            raise UnsupportedOverlapError(
                f"trace: --tp {self.num_ranks}, but there are {len(devices)} devices. "
                "Take fewer, or start it in a process of its own."
            )
        return devices[: self.num_ranks]

    def _place(self, shape, sharding):
        draws = np.random.default_rng(0).standard_normal(shape, np.float32)
        array = draws.astype(np.dtype(self.dtype))
        return jax.make_array_from_callback(shape, sharding, lambda index: array[index])
