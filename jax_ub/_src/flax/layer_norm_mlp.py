"""A layer that normalizes its inputs and then applies an MLP."""

from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx

from jax_ub._src import checks as shapes
from jax_ub._src.flax import activation as activations
from jax_ub._src.flax.layer_norm_linear import make_norm, normalize
from jax_ub._src.flax.linear import (
    Linear,
    LinearOptions,
    call_together,
    check_options,
    userbuffers_name,
)


class LayerNormMLP(nnx.Module):
    """A norm followed by a tensor-parallel MLP with two overlapped GEMMs.

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
    """

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
        check_options(
            LayerNormMLP,
            options,
            rngs=rngs,
        )
        op = "LayerNormMLP"
        shapes.check_size(op, "hidden_size", hidden_size)
        shapes.check_size(op, "ffn_hidden_size", ffn_hidden_size)
        self.activation, is_gated = activations.resolve(op, activation)
        self.norm = make_norm(
            op, normalization, hidden_size, epsilon=epsilon, rngs=rngs, options=options
        )

        def column():
            name = userbuffers_name("fc1", options)
            sizes = hidden_size, ffn_hidden_size
            return Linear(*sizes, parallel="column", ub_name=name, rngs=rngs, **options)

        self.gate: Linear | None = column() if is_gated else nnx.data(None)
        self.fc1 = column()
        self.fc2 = Linear(
            ffn_hidden_size,
            hidden_size,
            parallel="row",
            ub_name=userbuffers_name("fc2", options),
            rngs=rngs,
            **options,
        )

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
        if self.gate is None:
            hidden = self.activation(self.fc1(normalized))
        else:
            gate, up = call_together((self.gate, self.fc1), normalized)
            hidden = self.activation(gate) * up
        return self.fc2(hidden, residual=residual)
