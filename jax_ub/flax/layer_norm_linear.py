"""A norm, then a linear layer: Transformer Engine's `LayerNormLinear`."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ub import shapes
from jax_ub.flax import normalization as normalizations
from jax_ub.flax.linear import Linear, LinearOptions, check_options

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
    """Makes Flax's norm over the features, in the dtypes of the layers after it.

    Every token is normalized by the rank that has it, before it is gathered.

    Raises:
        UnknownNameError: if there is no norm of that name.
        ShapeContractError: if `epsilon` is no number of 0 or more.
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
    """Calls a norm.

    Raises:
        ShapeContractError: if the inputs have another number of features.
    """
    normalizations.check_features(op, norm.num_features, inputs)
    return norm(inputs)


class LayerNormLinear(nnx.Module):
    """`Linear` of normalized inputs, such as a language model's head.

    Transformer Engine: `te.LayerNormLinear`.

    Attributes:
        norm: `nnx.LayerNorm` or `nnx.RMSNorm`, on whole features.
        linear: `Linear`.
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
        """Creates the parameters.

        Args:
            in_features: the global number of input features.
            out_features: the global number of output features.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or the mean square, before its root.
            parallel: "column" or None.
            ub_name: the linear layer's name: in errors, and in `initialize_ub`.
            return_layernorm_output: whether a call returns what the norm made, too.
            rngs: the random keys.
            **options: further arguments of `Linear`.

        Raises:
            UnknownNameError: if there is no such norm, `parallel`, method or axis.
            UnsupportedOverlapError: if `parallel` is "row", where no rank has all
                features of a token.
            ShapeContractError: if a size is no positive integer, a sharded dimension
                does not divide into the ranks, or `epsilon` is no number of 0 or more.
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
        """Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

        With `return_layernorm_output` a pair of that and of the normalized inputs.
        """
        normalized = normalize("LayerNormLinear", self.norm, inputs)
        y = self.linear(normalized)
        return (y, normalized) if self.return_layernorm_output else y
