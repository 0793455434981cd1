"""Programs of AG+GEMM, GEMM+RS and GEMM+AR in jax_ub and XLA, with their shardings.

Each multiplies x [M, K] by w [K, N], in global sizes. AG+GEMM is the column-parallel
linear of an MLP; GEMM+RS and GEMM+AR are the row-parallel linear that follows it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

import jax_ub as ub
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.devices import AXIS, Spec
from jax_ub._src.tools.bench.dots import Dot
from jax_ub._src.tools.bench.workloads import Shape

# Per-device function of x and w.
Program = Callable[[jax.Array, jax.Array], jax.Array]

_ROWS, _COLUMNS = Spec(AXIS, None), Spec(None, AXIS)


@dataclasses.dataclass(frozen=True)
class ForwardOp:
    """One of AG+GEMM, GEMM+RS and GEMM+AR, and the XLA programs to compare it with.

    Attributes:
        name: name on the command line.
        public: jax_ub's function.
        in_specs: shardings of x and w.
        out_spec: sharding of the result.
        naive: XLA's program as most users write it.
        ring: XLA's program from ppermute rings; takes the keyword argument `dot`.
        reductions: XLA collectives that reduce the product, by name. Empty if the op
            gathers x instead.
    """

    name: str
    public: Callable[..., jax.Array]
    in_specs: tuple[Spec, Spec]
    out_spec: Spec
    naive: Program
    ring: Callable[..., jax.Array]
    reductions: Mapping[str, Callable[[jax.Array], jax.Array]]

    def shape(self, column: Shape) -> Shape:
        """Returns the op's sizes in an MLP whose column-parallel linear is `column`."""
        return column.row if self.reductions else column

    def local_shapes(
        self, shape: Shape, num_ranks: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of one rank's GEMM operands, x after any gather, and w."""
        if self.reductions:
            share = shape.K // num_ranks
            return (shape.M, share), (share, shape.N)
        return (shape.M, shape.K), (shape.K, shape.N // num_ranks)

    def own(self, method: str) -> Program:
        """Returns jax_ub's function, with the axis name and method already bound."""
        return functools.partial(self.public, axis_name=AXIS, method=method)

    def ways(self, dot: Dot, dtype: str) -> dict[str, Program]:
        """Returns the variants of XLA's program to time, by a description of each.

        They differ in the GEMM, the collective and the dtype in which partial sums are
        reduced.

        Args:
            dot: the fastest dot of the local shapes.
            dtype: dtype of the operands.
        """
        if self.reductions:
            found = {
                f"{dot}, {name} in {moved}": peers.reduced(collective, dot, moved)
                for name, collective in self.reductions.items()
                for moved in peers.sum_dtypes(dtype)
            }
        else:
            found = {str(dot): lambda x, w: dot(peers.gather(x), w, x.dtype)}
        return {**found, cases.AS_WRITTEN: self.naive}


FORWARD_OPS = {
    op.name: op
    for op in (
        ForwardOp(
            name="all_gather_matmul",
            public=ub.all_gather_matmul,
            in_specs=(_ROWS, _COLUMNS),
            out_spec=_COLUMNS,
            naive=peers.naive_column,
            ring=peers.ring_gather_dot,
            reductions={},
        ),
        ForwardOp(
            name="matmul_reduce_scatter",
            public=ub.matmul_reduce_scatter,
            in_specs=(_COLUMNS, _ROWS),
            out_spec=_ROWS,
            naive=peers.naive_row,
            ring=peers.ring_dot_scatter,
            reductions={"psum_scatter": peers.scatter},
        ),
        ForwardOp(
            name="matmul_all_reduce",
            public=ub.matmul_all_reduce,
            in_specs=(_COLUMNS, _ROWS),
            # The result is replicated: each rank has all rows. It is declared as
            # sharded by rows, because shard_map would otherwise check the replication.
            out_spec=_ROWS,
            naive=peers.naive_all_reduce,
            ring=peers.ring_dot_all_reduce,
            reductions={
                "psum": peers.all_reduce,
                "psum_scatter and all_gather": peers.scatter_and_gather,
            },
        ),
    )
}
