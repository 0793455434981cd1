"""A layer that normalizes its inputs and then applies a linear layer."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ub._src import checks as shapes
from jax_ub._src.flax import normalization as normalizations
from jax_ub._src.flax.linear import Linear, LinearOptions, check_options

NORMS = {"LayerNorm": nnx.LayerNorm, "RMSNorm": nnx.RMSNorm}


def make_norm(
    op: str,
    normalization: str,
    num_features: int,
    *,
    epsilon: float,
    rngs: nnx.Rngs,
    options: LinearOptions,
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Creates `nnx.LayerNorm` or `nnx.RMSNorm`, in the dtypes of the layers after it.

    Each rank normalizes its own tokens, before they are gathered.

    Raises:
        UnknownNameError: if the name of the norm is unknown.
        ShapeContractError: if `epsilon` is not a non-negative number.
    """
    shapes.check_epsilon(op, "epsilon", epsilon)
    norm = normalizations.resolve(op, normalization, NORMS)
    return norm(
        num_features,
        epsilon=epsilon,
        dtype=options.get("dtype"),
        param_dtype=options.get("param_dtype", jnp.float32),
        rngs=rngs,
    )


def normalize(
    op: str, norm: nnx.LayerNorm | nnx.RMSNorm, inputs: jax.Array
) -> jax.Array:
    """Checks the inputs' number of features and applies a norm.

    Raises:
        ShapeContractError: if the inputs have a different number of features.
    """
    normalizations.check_features(op, norm.num_features, inputs)
    return norm(inputs)


class LayerNormLinear(nnx.Module):
    """A norm followed by a `Linear`, for example as the head of a language model.

    Transformer Engine: `te.LayerNormLinear`.

    Attributes:
        norm: `nnx.LayerNorm` or `nnx.RMSNorm`, over all features of a token.
        linear: the `Linear` after the norm.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        normalization: str = "LayerNorm",
        epsilon: float = 1e-6,
        parallel: str | None = None,
        ub_name: str | None = None,
        return_layernorm_output: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates the norm and the linear layer with their parameters.

        Args:
            in_features: the global number of input features.
            out_features: the global number of output features.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or to the mean square, before the root.
            parallel: "column" or None.
            ub_name: the linear layer's name in `initialize_ub` and in error messages.
            return_layernorm_output: whether a call also returns the normalized inputs.
            rngs: the PRNG streams for the initializers.
            **options: further arguments of `Linear`.

        Raises:
            UnknownNameError: if the norm, `parallel`, method or axis is unknown.
            UnsupportedOverlapError: if `parallel` is "row". Then no rank has all
                features of a token, which the norm needs.
            ShapeContractError: if a size is not a positive integer, the number of ranks
                does not divide a sharded dimension, or `epsilon` is not a non-negative
                number.
        """
        check_options(
            LayerNormLinear,
            options,
            rngs=rngs,
            return_layernorm_output=return_layernorm_output,
        )
        normalizations.check_parallel("LayerNormLinear", parallel)
        shapes.check_size("LayerNormLinear", "in_features", in_features)
        self.norm = make_norm(
            "LayerNormLinear",
            normalization,
            in_features,
            epsilon=epsilon,
            rngs=rngs,
            options=options,
        )
        self.linear = Linear(
            in_features,
            out_features,
            parallel=parallel,
            ub_name=ub_name,
            rngs=rngs,
            **options,
        )
        self.return_layernorm_output = return_layernorm_output

    def __call__(self, inputs: jax.Array) -> Any:
        """Normalizes each token and applies the linear layer.

        Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

        With `return_layernorm_output`, returns a pair of the result and the normalized
        inputs.
        """
        normalized = normalize("LayerNormLinear", self.norm, inputs)
        y = self.linear(normalized)
        return (y, normalized) if self.return_layernorm_output else y
