"""The sizes that are compared, and how they are written on the command line."""

import dataclasses
import re

from jax_ub.errors import ShapeContractError, shown

_TEXT = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The global sizes of a GEMM: tokens M, contracting K, output N."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        """Writes the sizes as they are read from the command line."""
        return f"{self.M}x{self.K}x{self.N}"

    @property
    def flops(self) -> int:
        """Operations of one GEMM."""
        return 2 * self.M * self.K * self.N

    @property
    def operands(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of x and w."""
        return (self.M, self.K), (self.K, self.N)

    @property
    def row(self) -> "Shape":
        """The GEMM of the row linear that follows this column linear in an MLP."""
        return Shape(self.M, self.N, self.K)

    def bytes(self, itemsize: int) -> int:
        """Bytes of both operands and the result."""
        return itemsize * (self.M * self.K + self.K * self.N + self.M * self.N)

    def divides(self, num_ranks: int) -> bool:
        """Whether every op can shard these sizes over that many ranks."""
        return not (self.M % num_ranks or self.K % num_ranks or self.N % num_ranks)


def parse_shape(text: str) -> Shape:
    """Reads `MxKxN`.

    Raises:
        ShapeContractError: if the text is something else or a size is 0.
    """
    match = _TEXT.fullmatch(text.strip())
    sizes = [int(size) for size in match.groups()] if match else [0]
    if 0 in sizes:
        raise ShapeContractError(
            f"shape {shown(text)} is not MxKxN with positive sizes. Write, for "
            "example, 512x1024x2816."
        )
    return Shape(*sizes)


# Llama 2 7B has K = 4096 and N = 11008 in its MLP: the first two are about a third and
# a quarter of that in both directions. The third is the fused kernel of queries, keys
# and values with fewer key heads; the fourth has few rows, as in decoding. In bf16 two
# cores take 1 to 20 ms for them, older ones 2 to 80.
DEFAULT = (
    Shape(1536, 1280, 3840),
    Shape(512, 1024, 2816),
    Shape(1024, 1024, 1536),
    Shape(64, 1024, 2816),
)
QUICK = (Shape(32, 48, 80),)
