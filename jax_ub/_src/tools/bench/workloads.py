"""Sizes of the GEMMs that benchmarks run, and their format on the command line."""

import dataclasses
import re

from jax_ub._src.errors import ShapeContractError, shown

_TEXT = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The global sizes of a GEMM: x [M, K] times w [K, N], with M tokens."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        """Returns the sizes in the format that `parse_shape` reads."""
        return f"{self.M}x{self.K}x{self.N}"

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of one GEMM."""
        return 2 * self.M * self.K * self.N

    @property
    def operands(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of x and w, [M, K] and [K, N]."""
        return (self.M, self.K), (self.K, self.N)

    @property
    def row(self) -> "Shape":
        """Returns the sizes of the row linear layer after this column linear layer.

        In an MLP, it maps the N features back to K.
        """
        return Shape(self.M, self.N, self.K)

    def bytes(self, itemsize: int) -> int:
        """Returns the bytes of x, w and the result with `itemsize` bytes an element."""
        return itemsize * (self.M * self.K + self.K * self.N + self.M * self.N)

    def divides(self, num_ranks: int) -> bool:
        """Returns whether M, K and N are all divisible by `num_ranks`."""
        return not (self.M % num_ranks or self.K % num_ranks or self.N % num_ranks)


def parse_shape(text: str) -> Shape:
    """Parses a shape in the format `MxKxN`, such as 512x1024x2816.

    Raises:
        ShapeContractError: if the text has another format or a size is 0.
    """
    match = _TEXT.fullmatch(text.strip())
    sizes = [int(size) for size in match.groups()] if match else [0]
    if 0 in sizes:
        raise ShapeContractError(
            f"shape {shown(text)} is not MxKxN with positive sizes. Write, for "
            "example, 512x1024x2816."
        )
    return Shape(*sizes)


# The MLP of Llama 2 7B has K = 4096 and N = 11008. The first two shapes scale both by
# about a third and a quarter. The third is a fused query, key and value kernel with
# fewer key heads; the fourth has few rows, as in decoding. In bf16 they take 1 to 20 ms
# on two recent cores, 2 to 80 ms on older ones.
DEFAULT = (
    Shape(1536, 1280, 3840),
    Shape(512, 1024, 2816),
    Shape(1024, 1024, 1536),
    Shape(64, 1024, 2816),
)
QUICK = (Shape(32, 48, 80),)
