"""The linear layers of well-known models, whose sizes `simulate` and `tune` take."""

import dataclasses
from collections.abc import Mapping

from jax_ub._src.tools.command_line import Shape


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer of a transformer model: its forward op and global sizes [K, N]."""

    name: str
    op: str
    K: int
    N: int

    def shape(self, tokens: int) -> Shape:
        return Shape(tokens, self.K, self.N)


def _layers(hidden: int, qkv: int, ffn_in: int, ffn_out: int) -> tuple[Layer, ...]:
    """Returns the linear layers (qkv, proj, fc1, fc2) of one transformer layer.

    `ffn_in` are the output features of the first MLP layer, including the gate,
    `ffn_out` the input features of the second one.
    """
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    return (
        Layer("qkv", gather, hidden, qkv),
        Layer("proj", scatter, hidden, hidden),
        Layer("fc1", gather, hidden, ffn_in),
        Layer("fc2", scatter, ffn_out, hidden),
    )


# The linear layers of one transformer layer of each model, in the order in which they
# run.
MODELS: Mapping[str, tuple[Layer, ...]] = {
    "llama3-70b": _layers(8192, 10240, 57344, 28672),
    "llama3-405b": _layers(16384, 18432, 106496, 53248),
    "gpt3-175b": _layers(12288, 36864, 49152, 49152),
}
