"""A norm, then a linear layer: Transformer Engine's `LayerNormLinear`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from jax_ub import shapes
from jax_ub.flax import normalization as normalizations
from jax_ub.flax.linear import check_options
from jax_ub.flax.linen.linear import Linear
from jax_ub.flax.linen.tensor_parallel import TensorParallel

NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def make_norm(
    module: TensorParallel, name: str, normalization: str, epsilon: float
) -> nn.LayerNorm | nn.RMSNorm:
    """Makes Flax's norm over the features, in the dtypes of the layers after it.

    Every token is normalized by the rank that has it, before it is gathered.

    Raises:
        UnknownNameError: if there is no norm of that name.
        ShapeContractError: if `epsilon` is no number of 0 or more.
    """
    op = type(module).__name__
    shapes.check_epsilon(op, "epsilon", epsilon)
    norm = normalizations.resolve(op, normalization, NORMS)
    dtypes = {"dtype": module.dtype, "param_dtype": module.param_dtype}
    return norm(epsilon=epsilon, name=name, **dtypes)


class LayerNormLinear(TensorParallel):
    """`Linear` of normalized inputs, such as a language model's head.

    Its submodules are `norm`, `nn.LayerNorm` or `nn.RMSNorm` on whole features, and
    `linear`.

    Transformer Engine: `te.LayerNormLinear`.

    Attributes:
        features: the global number of output features, or sizes of several dimensions.
        normalization: "LayerNorm" or "RMSNorm".
        epsilon: added to the variance, or the mean square, before its root.
        parallel: "column" or None.
        ub_name: the linear layer's name: in errors, and in `initialize_ub`.
        return_layernorm_output: whether a call returns what the norm made, too.
    """

    features: int | Sequence[int]
    _: dataclasses.KW_ONLY
    normalization: str = "LayerNorm"
    epsilon: float = 1e-6
    parallel: str | None = None
    ub_name: str | None = None
    return_layernorm_output: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Maps `[..., tokens, in]` to `[..., tokens, *features]`.

        With `return_layernorm_output` a pair of that and of the normalized inputs.

        Raises:
            UnknownNameError: if there is no such norm, `parallel`, method or axis.
            UnsupportedOverlapError: if `parallel` is "row", where no rank has all
                features of a token.
            ShapeContractError: if the inputs are no array with features.
        """
        check_options(LayerNormLinear, self.linear_options())
        normalizations.check_parallel("LayerNormLinear", self.parallel)
        shapes.check_rank("LayerNormLinear", "inputs", inputs, 1)
        normalized = make_norm(self, "norm", self.normalization, self.epsilon)(inputs)
        linear = Linear(
            self.features,
            parallel=self.parallel,
            ub_name=self.ub_name,
            name="linear",
            **self.linear_options(),
        )
        y = linear(normalized)
        return (y, normalized) if self.return_layernorm_output else y
