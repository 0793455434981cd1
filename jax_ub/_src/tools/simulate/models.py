"""Sizes of the linear layers of well-known transformer models, for the simulator."""

import dataclasses
from collections.abc import Mapping

from jax_ub._src.errors import UnknownNameError, nearest, shown


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer of a transformer model: its forward op and global sizes [K, N]."""

    name: str
    op: str
    K: int
    N: int

    @property
    def short_op(self) -> str:
        """Returns the abbreviation of the op's collective for tables, "ag" or "rs"."""
        return "ag" if self.op == "all_gather_matmul" else "rs"


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer model: the four linear layers of each of its transformer layers.

    The linear layers are in the order of the forward pass.
    """

    name: str
    layers: tuple[Layer, ...]

    def layer(self, name: str) -> Layer:
        """Returns the linear layer of this name, such as "qkv" or "fc1".

        Raises:
            UnknownNameError: if no layer has this name.
        """
        names = [layer.name for layer in self.layers]
        if name not in names:
            raise UnknownNameError(
                f"simulate: {self.name} has no layer {shown(name)}. "
                f"{nearest(name, names)}"
            )
        return self.layers[names.index(name)]


def transformer(name: str, hidden: int, qkv: int, ffn_in: int, ffn_out: int) -> Model:
    """Returns a model with the linear layers "qkv", "proj", "fc1" and "fc2".

    Args:
        name: name of the model.
        hidden: number of features of the residual stream.
        qkv: number of features of queries, keys and values together.
        ffn_in: number of output features of the first MLP layer, including the gate.
        ffn_out: number of input features of the second MLP layer.
    """
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    return Model(
        name,
        (
            Layer("qkv", gather, hidden, qkv),
            Layer("proj", scatter, hidden, hidden),
            Layer("fc1", gather, hidden, ffn_in),
            Layer("fc2", scatter, ffn_out, hidden),
        ),
    )


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        transformer("llama3-70b", 8192, 10240, 57344, 28672),
        transformer("llama3-405b", 16384, 18432, 106496, 53248),
        transformer("gpt3-175b", 12288, 36864, 49152, 49152),
    )
}


def find(name: str) -> Model:
    """Returns the transformer model of this name, such as "llama3-70b".

    Raises:
        UnknownNameError: if no model has this name; suggests the nearest name.
    """
    if name not in MODELS:
        raise UnknownNameError(
            f"model {shown(name)} is not known. {nearest(name, MODELS)}"
        )
    return MODELS[name]
