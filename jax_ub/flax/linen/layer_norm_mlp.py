"""A norm, then an MLP: Transformer Engine's `LayerNormMLP`."""

import dataclasses
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub import shapes
from jax_ub.flax import activation as activations
from jax_ub.flax import normalization as normalizations
from jax_ub.flax.linear import check_options, userbuffers_name
from jax_ub.flax.linen.layer_norm_linear import make_norm
from jax_ub.flax.linen.linear import Linear, call_together
from jax_ub.flax.linen.tensor_parallel import TensorParallel


class LayerNormMLP(TensorParallel):
    """Two linear layers of normalized inputs, first column, then row parallel.

    The tokens are gathered once, by the GEMM of fc1, and of the gate where there is
    one; the GEMM of fc2 sums and scatters them. In `initialize_ub` the two calls have
    the names "fc1" and "fc2".

    Its submodules are `norm`, `nn.LayerNorm` or `nn.RMSNorm` on whole features; `fc1`,
    a column parallel `Linear`, `[hidden_size, ffn_hidden_size]`; `gate` of the same
    shape, for activations of a gate; and `fc2`, the row parallel way back.

    Transformer Engine: `te.LayerNormMLP`.

    Attributes:
        hidden_size: the number of features between layers.
        ffn_hidden_size: the global number of features between fc1 and fc2.
        activation: "gelu", "qgelu", "relu", "srelu" or "silu"; "geglu", "qgeglu",
            "reglu", "sreglu" or "swiglu", `function(x @ gate) * (x @ fc1)`; or a
            function of each element.
        normalization: "LayerNorm" or "RMSNorm".
        epsilon: added to the variance, or the mean square, before its root.
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
        """Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            residual: what fc2 adds to its result inside its call, such as the inputs.

        Raises:
            UnknownNameError: if there is no such activation, norm, method or axis.
            ShapeContractError: if a size is no positive integer, the inputs have
                another number of features, `ffn_hidden_size` does not divide into the
                ranks, or `epsilon` is no number of 0 or more.
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
