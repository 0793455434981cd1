"""A layer that normalizes its inputs and then applies a linear layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from jax_ub._src import checks as shapes
from jax_ub._src.flax import normalization as normalizations
from jax_ub._src.flax.linear import check_options
from jax_ub._src.flax.linen.linear import Linear
from jax_ub._src.flax.linen.tensor_parallel import TensorParallel

NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def make_norm(
    module: TensorParallel, name: str, normalization: str, epsilon: float
) -> nn.LayerNorm | nn.RMSNorm:
    """Creates `nn.LayerNorm` or `nn.RMSNorm`, in the dtypes of the layers after it.

    Each rank normalizes its own tokens, before they are gathered.

    Raises:
        UnknownNameError: if the name of the norm is unknown.
        ShapeContractError: if `epsilon` is not a non-negative number.
    """
    op = type(module).__name__
    shapes.check_epsilon(op, "epsilon", epsilon)
    norm = normalizations.resolve(op, normalization, NORMS)
    dtypes = {"dtype": module.dtype, "param_dtype": module.param_dtype}
    return norm(epsilon=epsilon, name=name, **dtypes)


class LayerNormLinear(TensorParallel):
    """A norm followed by a `Linear`, for example as the head of a language model.

    The submodules are `norm`, an `nn.LayerNorm` or `nn.RMSNorm` over all features of a
    token, and `linear`.

    Transformer Engine: `te.LayerNormLinear`.

    Attributes:
        features: the global number of output features, or a tuple of output sizes.
        normalization: "LayerNorm" or "RMSNorm".
        epsilon: added to the variance, or to the mean square, before the root.
        parallel: "column" or None.
        ub_name: the linear layer's name in `initialize_ub` and in error messages.
        return_layernorm_output: whether a call also returns the normalized inputs.
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
        """Normalizes each token and applies the linear layer.

        Maps `[..., tokens, in]` to `[..., tokens, *features]`.

        With `return_layernorm_output`, returns a pair of the result and the normalized
        inputs.

        Raises:
            UnknownNameError: if the norm, `parallel`, method or axis is unknown.
            UnsupportedOverlapError: if `parallel` is "row". Then no rank has all
                features of a token, which the norm needs.
            ShapeContractError: if the inputs are not an array with a feature dimension.
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
