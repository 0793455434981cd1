"""Sizes of the linear layers of well-known transformer models."""

import dataclasses
from collections.abc import Mapping

from jax_ub._src.errors import UnknownNameError, nearest, shown


@dataclasses.dataclass(frozen=True)
class Layer:
    """The name, forward op and global kernel size [K, N] of a model's linear layer."""

    name: str
    op: str
    K: int
    N: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a transformer model, which determine its four linear layers.

    Args:
        hidden: number of features of the residual stream.
        qkv: number of features of queries, keys and values together.
        ffn_in: number of output features of the first MLP layer, including the gate.
        ffn_out: number of input features of the second MLP layer.
    """

    name: str
    hidden: int
    qkv: int
    ffn_in: int
    ffn_out: int

    @property
    def layers(self) -> tuple[Layer, ...]:
        gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
        return (
            Layer("qkv", gather, self.hidden, self.qkv),
            Layer("proj", scatter, self.hidden, self.hidden),
            Layer("fc1", gather, self.hidden, self.ffn_in),
            Layer("fc2", scatter, self.ffn_out, self.hidden),
        )


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("llama3-70b", 8192, 10240, 57344, 28672),
        Model("llama3-405b", 16384, 18432, 106496, 53248),
        Model("gpt3-175b", 12288, 36864, 49152, 49152),
    )
}


def find(name: str) -> Model:
    """Returns the transformer model of this name, such as "llama3-70b"."""
    if name not in MODELS:
        raise UnknownNameError(
            f"model {shown(name)} is not known. {nearest(name, MODELS)}"
        )
    return MODELS[name]
