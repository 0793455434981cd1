"""The linear layers of transformers that the tables are about."""

import dataclasses
from collections.abc import Mapping

from jax_ub.errors import UnknownNameError, nearest, shown


@dataclasses.dataclass(frozen=True)
class Layer:
    """One linear layer: which op its forward is, and its global sizes."""

    name: str
    op: str
    K: int
    N: int

    @property
    def short_op(self) -> str:
        """The communication, as tables write it."""
        return "ag" if self.op == "all_gather_matmul" else "rs"


@dataclasses.dataclass(frozen=True)
class Model:
    """The four linear layers of one transformer layer, in the order of the forward."""

    name: str
    layers: tuple[Layer, ...]

    def layer(self, name: str) -> Layer:
        """Finds a layer by its name.

        Raises:
            UnknownNameError: if there is none of that name.
        """
        names = [layer.name for layer in self.layers]
        if name not in names:
            raise UnknownNameError(
                f"simulate: {self.name} has no layer {shown(name)}. "
                f"{nearest(name, names)}"
            )
        return self.layers[names.index(name)]


def transformer(name: str, hidden: int, qkv: int, ffn_in: int, ffn_out: int) -> Model:
    """The layers of a block.

    Args:
        name: of the model.
        hidden: features of the residual stream.
        qkv: features of queries, keys and values together.
        ffn_in: output features of the first MLP layer, gate included.
        ffn_out: input features of the second.
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
    """Finds a model by its name.

    Raises:
        UnknownNameError: if there is none of that name; names the nearest.
    """
    if name not in MODELS:
        raise UnknownNameError(
            f"model {shown(name)} is not known. {nearest(name, MODELS)}"
        )
    return MODELS[name]
