"""The nnx layers `LayerNormLinear` and `LayerNormMLP`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
from flax import nnx

from jax_ub._src import arguments, checks
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.flax.linear import (
    Linear,
    apply_layers,
    apply_with_residual,
    inner_linear,
)
from jax_ub._src.flax.options import (
    FixedArguments,
    LinearOptions,
    check_norm_inputs,
    check_norm_parallel,
    check_options,
    is_named_activation,
    make_norm,
    resolve_activation,
)


def mlp(
    activation: Callable[[jax.Array], jax.Array],
    layers: Sequence[Any],
    normalized: jax.Array,
    residual: jax.Array | None,
) -> jax.Array:
    """Computes an MLP with `layers` (fc1, gate, fc2). Without gating, gate is None."""
    fc1, gate, fc2 = layers

    def hidden(product, up=None):
        activated = activation(product)
        if not checks.is_array(activated):
            raise ShapeContractError(
                f"LayerNormMLP: activation returned {shown(activated)} for an array of "
                f"shape {product.shape}. Return an array of that shape."
            )
        return activated if up is None else activated * up

    if is_named_activation(activation):
        # With jax.checkpoint, the backward pass recomputes the activation, and the
        # forward pass saves only the products of the GEMMs.
        hidden = jax.checkpoint(hidden)
    if gate is None:
        y = hidden(fc1(normalized))
    else:
        y = hidden(*apply_layers((gate, fc1), normalized))
    return apply_with_residual(fc2, y, residual)


def normalize(
    op: str, norm: nnx.LayerNorm | nnx.RMSNorm, inputs: jax.Array
) -> jax.Array:
    check_norm_inputs(op, norm.num_features, inputs, norm)
    return apply_norm(norm, inputs)


def apply_norm(norm: Any, x: jax.Array) -> jax.Array:
    """Applies an nnx norm; the backward pass recomputes its result to save memory.

    The forward pass of a norm of Flax then saves x, and no f32 array between x and the
    result. Norms of other classes are applied as they are.
    """
    if type(norm) not in (nnx.LayerNorm, nnx.RMSNorm):
        return norm(x)
    return jax.checkpoint(lambda x: norm(x))(x)


class LayerNormLinear(FixedArguments, nnx.Module):
    """A norm followed by a `Linear`, for example as the head of a language model.

    Transformer Engine: `te.LayerNormLinear`.

    Attributes:
        norm: `nnx.LayerNorm` or `nnx.RMSNorm`, over all features of a token.
        linear: the `Linear` after the norm.
        return_layernorm_output: whether a call also returns the normalized inputs.
    """

    _settable = frozenset({"return_layernorm_output"})

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
        op = "LayerNormLinear"
        check_options(
            LayerNormLinear,
            options,
            rngs=rngs,
            return_layernorm_output=return_layernorm_output,
        )
        check_norm_parallel(op, parallel)
        checks.check_size(op, "in_features", in_features)
        self.norm = make_norm(
            nnx, op, normalization, epsilon, options, in_features, rngs=rngs
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
        """Computes `linear(norm(inputs))`.

        Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`. With
        `return_layernorm_output`, returns a pair of the result and the normalized
        inputs.
        """
        op, returns_both = "LayerNormLinear", self.return_layernorm_output
        arguments.check(op, return_layernorm_output=returns_both)
        normalized = normalize(op, self.norm, inputs)
        y = self.linear(normalized)
        return (y, normalized) if returns_both else y


class LayerNormMLP(FixedArguments, nnx.Module):
    """A norm and a tensor-parallel MLP whose two GEMMs overlap with communication.

    The MLP consists of the column-parallel fc1, an activation and the row-parallel fc2.

    The tokens are gathered once, in one AG+GEMM for fc1 and, if present, the gate. fc2
    is one GEMM+RS, which sums and scatters its result. The two calls are named "fc1"
    and "fc2" in `initialize_ub`.

    Transformer Engine: `te.LayerNormMLP`.

    Attributes:
        norm: `nnx.LayerNorm` or `nnx.RMSNorm`, over all features of a token.
        fc1: column-parallel `Linear`, `[hidden_size, ffn_hidden_size]`.
        gate: column-parallel `Linear` with the shape of fc1 for gated activations, else
            None.
        fc2: row-parallel `Linear`, `[ffn_hidden_size, hidden_size]`.
        activation: the activation function.
    """

    _settable = frozenset({"activation"})

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str | Callable[[jax.Array], jax.Array] = "gelu",
        normalization: str = "LayerNorm",
        epsilon: float = 1e-6,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates the norm and the linear layers with their parameters.

        Args:
            hidden_size: the number of input and output features.
            ffn_hidden_size: the global number of features between fc1 and fc2.
            activation: "gelu", "qgelu", "relu", "srelu" or "silu"; "geglu", "qgeglu",
                "reglu", "sreglu" or "swiglu", for `function(x @ gate) * (x @ fc1)`; or
                an elementwise function.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or to the mean square, before the root.
            rngs: the PRNG streams for the initializers.
            **options: further arguments of `Linear`.

        Raises:
            UnknownNameError: if an activation, norm, method or axis is unknown.
            ShapeContractError: if a size is not a positive integer, the number of ranks
                does not divide `ffn_hidden_size`, or `epsilon` is not a non-negative
                number.
        """
        op = "LayerNormMLP"
        check_options(LayerNormMLP, options, rngs=rngs)
        checks.check_size(op, "hidden_size", hidden_size)
        checks.check_size(op, "ffn_hidden_size", ffn_hidden_size)
        self.activation, is_gated = resolve_activation(op, activation)
        self.norm = make_norm(
            nnx, op, normalization, epsilon, options, hidden_size, rngs=rngs
        )
        sizes = hidden_size, ffn_hidden_size
        self.gate: Linear | None = nnx.data(None)
        if is_gated:
            self.gate = inner_linear(*sizes, "column", "fc1", rngs, options)
        self.fc1 = inner_linear(*sizes, "column", "fc1", rngs, options)
        self.fc2 = inner_linear(*sizes[::-1], "row", "fc2", rngs, options)

    def __call__(
        self, inputs: jax.Array, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Normalizes each token and applies the MLP, adding an optional residual.

        Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            residual: array with the shape of the result, for example the inputs. fc2
                adds it inside its fused call, before rounding.
        """
        normalized = normalize("LayerNormMLP", self.norm, inputs)
        arguments.check_function("LayerNormMLP", "activation", self.activation)
        layers = (self.fc1, self.gate, self.fc2)
        return mlp(self.activation, layers, normalized, residual)
