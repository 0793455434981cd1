"""A layer that normalizes its inputs and then applies an MLP."""

import dataclasses
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub._src import checks as shapes
from jax_ub._src.flax import activation as activations
from jax_ub._src.flax import normalization as normalizations
from jax_ub._src.flax.linear import check_options, userbuffers_name
from jax_ub._src.flax.linen.layer_norm_linear import make_norm
from jax_ub._src.flax.linen.linear import Linear, call_together
from jax_ub._src.flax.linen.tensor_parallel import TensorParallel


class LayerNormMLP(TensorParallel):
    """A norm followed by a tensor-parallel MLP with two overlapped GEMMs.

    The MLP consists of the column-parallel fc1, an activation and the row-parallel fc2.

    The tokens are gathered once, in one AG+GEMM for fc1 and, if present, the gate. fc2
    is one GEMM+RS, which sums and scatters its result. The two calls are named "fc1"
    and "fc2" in `initialize_ub`.

    The submodules are `norm`, an `nn.LayerNorm` or `nn.RMSNorm` over all features of a
    token; `fc1`, a column-parallel `Linear`, `[hidden_size, ffn_hidden_size]`; `gate`
    with the same shape, for gated activations only; and `fc2`, a row-parallel `Linear`,
    `[ffn_hidden_size, hidden_size]`.

    Transformer Engine: `te.LayerNormMLP`.

    Attributes:
        hidden_size: the number of input and output features.
        ffn_hidden_size: the global number of features between fc1 and fc2.
        activation: "gelu", "qgelu", "relu", "srelu" or "silu"; "geglu", "qgeglu",
            "reglu", "sreglu" or "swiglu", for `function(x @ gate) * (x @ fc1)`; or
            an elementwise function.
        normalization: "LayerNorm" or "RMSNorm".
        epsilon: added to the variance, or to the mean square, before the root.
    """

    hidden_size: int
    ffn_hidden_size: int
    _: dataclasses.KW_ONLY
    activation: str | Callable[[jax.Array], jax.Array] = "gelu"
    normalization: str = "LayerNorm"
    epsilon: float = 1e-6

    @nn.compact
    def __call__(
        self, inputs: jax.Array, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Normalizes each token and applies the MLP, adding an optional residual.

        Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            residual: array with the shape of the result, for example the inputs. fc2
                adds it inside its fused call, before rounding.

        Raises:
            UnknownNameError: if an activation, norm, method or axis is unknown.
            ShapeContractError: if a size is not a positive integer, the inputs have
                a different number of features, the number of ranks does not divide
                `ffn_hidden_size`, or `epsilon` is not a non-negative number.
        """
        check_options(LayerNormMLP, self.linear_options())
        for name in ("hidden_size", "ffn_hidden_size"):
            shapes.check_size("LayerNormMLP", name, getattr(self, name))
        activation, is_gated = activations.resolve("LayerNormMLP", self.activation)
        normalizations.check_features("LayerNormMLP", self.hidden_size, inputs)
        normalized = make_norm(self, "norm", self.normalization, self.epsilon)(inputs)
        options = self.linear_options()

        def column(name):
            return Linear(
                self.ffn_hidden_size,
                parallel="column",
                ub_name=userbuffers_name("fc1", options),
                name=name,
                **options,
            )

        fc1 = column("fc1")
        if is_gated:
            gated, up = call_together((column("gate"), fc1), normalized)
            hidden = activation(gated) * up
        else:
            hidden = activation(fc1(normalized))
        fc2 = Linear(
            self.hidden_size,
            parallel="row",
            ub_name=userbuffers_name("fc2", options),
            name="fc2",
            **options,
        )
        return fc2(hidden, residual=residual)
