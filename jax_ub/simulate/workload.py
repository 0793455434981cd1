"""What the steps of a schedule cost: the sizes behind a chunk."""

import dataclasses

from jax_ub.simulate.tiles import Gemm

GATHERS = ("all_gather_matmul", "all_gather")
PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One op at global sizes, as every rank sees it.

    Attributes:
        op: the name of the pattern, as the engine's schedules know it.
        M: tokens.
        K: contracting size, over all ranks.
        N: output features, over all ranks.
        num_ranks: P.
        itemsize: bytes of an element of the operands and results.
        partial_itemsize: bytes of an element of a partial sum on the wire.
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
        """Whether operands travel; partial sums do otherwise."""
        return self.op in GATHERS

    @property
    def has_product(self) -> bool:
        """Whether there is a GEMM in it."""
        return self.op in PRODUCTS

    @property
    def gemm(self) -> Gemm:
        """A rank's whole product."""
        if self.gathers:
            return Gemm(self.M, self.N // self.num_ranks, self.K)
        return Gemm(self.M, self.N, self.K // self.num_ranks)

    def gemm_of(self, num_rows: int) -> Gemm:
        """A rank's product of some of the rows."""
        return dataclasses.replace(self.gemm, m=num_rows)

    def piece_rows(self, num_splits: int) -> int:
        """Rows of one of the pieces of a rank's share of the rows."""
        return self.M // self.num_ranks // num_splits

    @property
    def features(self) -> int:
        """Width of what travels."""
        return self.K if self.gathers else self.N

    def wire_bytes(self, payload: str, num_rows: int) -> int:
        """Bytes of a put."""
        size = self.partial_itemsize if payload == "partial" else self.itemsize
        return num_rows * self.features * size

    def reduce_bytes(self, num_rows: int) -> int:
        """Bytes that the sum of all ranks' parts reads and writes."""
        parts = self.num_ranks * self.partial_itemsize + self.itemsize
        return num_rows * self.N * parts

    @property
    def one_shot_bytes(self) -> int:
        """What a rank sends in an all-reduce in one exchange: all to each peer."""
        return (self.num_ranks - 1) * self.wire_bytes("partial", self.M)

    @property
    def moved_bytes(self) -> float:
        """What a rank sends, and receives, at the least."""
        share = (self.num_ranks - 1) / self.num_ranks
        once = share * self.M * self.features * self.itemsize
        return 2 * once if self.op.endswith("all_reduce") else once
