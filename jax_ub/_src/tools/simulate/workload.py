"""Sizes of a simulated op: its GEMM, and the bytes that each step communicates."""

import dataclasses

from jax_ub._src.tools.simulate.tiles import Gemm

GATHERS = ("all_gather_matmul", "all_gather")
PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclasses.dataclass(frozen=True)
class Workload:
    """An op that the simulator runs, with its global sizes and element sizes.

    Attributes:
        op: name of the op in the engine's schedules.
        M: number of tokens.
        K: global contracting size.
        N: global number of output features.
        num_ranks: number of ranks P.
        itemsize: bytes per element of the operands and results.
        partial_itemsize: bytes per element of a partial sum on the wire.
    """

    op: str
    M: int
    K: int
    N: int
    num_ranks: int
    itemsize: int = 2
    partial_itemsize: int = 2

    @property
    def gathers(self) -> bool:
        """Returns whether the op gathers operands instead of reducing partial sums."""
        return self.op in GATHERS

    @property
    def has_product(self) -> bool:
        """Returns whether the op contains a GEMM, or is only a collective."""
        return self.op in PRODUCTS

    @property
    def gemm(self) -> Gemm:
        """Returns the sizes of the GEMM that one rank runs in the whole op.

        If the op gathers x, the rank has all rows and its share of the output features.
        Otherwise, it has all output features and its share of the contracting
        dimension.
        """
        if self.gathers:
            return Gemm(self.M, self.N // self.num_ranks, self.K)
        return Gemm(self.M, self.N, self.K // self.num_ranks)

    def gemm_of(self, num_rows: int) -> Gemm:
        """Returns the sizes of one rank's GEMM, restricted to `num_rows` rows."""
        return dataclasses.replace(self.gemm, m=num_rows)

    def piece_rows(self, num_splits: int) -> int:
        """Returns the rows of one of `num_splits` splits of a rank's chunk."""
        return self.M // self.num_ranks // num_splits

    @property
    def features(self) -> int:
        """Returns the number of columns of the array that is communicated."""
        return self.K if self.gathers else self.N

    def wire_bytes(self, payload: str, num_rows: int) -> int:
        """Returns the bytes that a rank sends to a peer for `num_rows` rows."""
        size = self.partial_itemsize if payload == "partial" else self.itemsize
        return num_rows * self.features * size

    def reduce_bytes(self, num_rows: int) -> int:
        """Returns the memory bytes read and written to sum all ranks' partial sums.

        The sum has `num_rows` rows.
        """
        parts = self.num_ranks * self.partial_itemsize + self.itemsize
        return num_rows * self.N * parts

    @property
    def one_shot_bytes(self) -> int:
        """Returns the bytes that a rank sends in a one-shot all-reduce.

        Each rank sends all of its partial sums to every peer.
        """
        return (self.num_ranks - 1) * self.wire_bytes("partial", self.M)

    @property
    def moved_bytes(self) -> float:
        """Returns the least bytes that a rank must send for the op, and receive."""
        share = (self.num_ranks - 1) / self.num_ranks
        once = share * self.M * self.features * self.itemsize
        return 2 * once if self.op.endswith("all_reduce") else once
