"""Sizes of the linear layers of well-known transformer models."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer of a transformer model: its forward op and global sizes [K, N]."""

    name: str
    op: str
    K: int
    N: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer model and the linear layers of one transformer layer, in order."""

    name: str
    layers: tuple[Layer, ...]


def _model(name: str, hidden: int, qkv: int, ffn_in: int, ffn_out: int) -> Model:
    """Returns a model from the features of its hidden state and of its layers.

    `ffn_in` are the output features of the first MLP layer, including the gate,
    `ffn_out` the input features of the second one.
    """
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    layers = (
        Layer("qkv", gather, hidden, qkv),
        Layer("proj", scatter, hidden, hidden),
        Layer("fc1", gather, hidden, ffn_in),
        Layer("fc2", scatter, ffn_out, hidden),
    )
    return Model(name, layers)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _model("llama3-70b", 8192, 10240, 57344, 28672),
        _model("llama3-405b", 16384, 18432, 106496, 53248),
        _model("gpt3-175b", 12288, 36864, 49152, 49152),
    )
}
