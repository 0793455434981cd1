"""The linen layers `LayerNormLinear`, `LayerNormMLP` and `MultiHeadAttention`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from jax_ub._src import checks
from jax_ub._src.flax.attention import project_qkv
from jax_ub._src.flax.core_attention import CoreAttention
from jax_ub._src.flax.linen_linear import Linear, TensorParallel, apply_layers
from jax_ub._src.flax.options import (
    check_attention_sizes,
    check_flags,
    check_norm_inputs,
    check_norm_parallel,
    norm_class,
    qk_norm_class,
    resolve_activation,
    userbuffers_name,
)


def make_norm(
    module: TensorParallel, name: str, normalization: str, epsilon: float
) -> nn.LayerNorm | nn.RMSNorm:
    """Creates a layer's `nn.LayerNorm` or `nn.RMSNorm`, with the layer's dtypes.

    Each rank normalizes its tokens before they are gathered.
    """
    norm = norm_class(type(module).__name__, normalization, epsilon, nn)
    dtypes = {"dtype": module.dtype, "param_dtype": module.param_dtype}
    return norm(epsilon=epsilon, name=name, **dtypes)


class LayerNormLinear(TensorParallel):
    """A norm followed by a `Linear`, for example as the head of a language model.

    The submodules are `norm`, an `nn.LayerNorm` or `nn.RMSNorm` over all features of a
    token, and `linear`.

    Transformer Engine: `te.LayerNormLinear`.

    Its attributes are the arguments of `jax_ub.flax.LayerNormLinear`, except for this:

    Attributes:
        features: the global number of output features, or a tuple of output sizes.
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
        """Normalizes each token and applies the linear layer: `linear(norm(x))`.

        Maps `[..., tokens, in]` to `[..., tokens, *features]`.

        With `return_layernorm_output`, returns a pair of the result and the normalized
        inputs.
        """
        check_flags("LayerNormLinear", self.linear_options())
        check_norm_parallel("LayerNormLinear", self.parallel)
        checks.check_rank("LayerNormLinear", "inputs", inputs, 1)
        check_norm_inputs("LayerNormLinear", inputs.shape[-1], inputs, self)
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

    Its attributes are the arguments of `jax_ub.flax.LayerNormMLP`.
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

        Maps `[..., tokens, hidden_size]` to the same shape. The arguments are those of
        `jax_ub.flax.LayerNormMLP`.
        """
        check_flags("LayerNormMLP", self.linear_options())
        for name in ("hidden_size", "ffn_hidden_size"):
            checks.check_size("LayerNormMLP", name, getattr(self, name))
        activation, is_gated = resolve_activation("LayerNormMLP", self.activation)
        check_norm_inputs("LayerNormMLP", self.hidden_size, inputs, self)
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
            gated, up = apply_layers((column("gate"), fc1), normalized)
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


class MultiHeadAttention(TensorParallel):
    """Multi-head attention that overlaps its two tensor-parallel GEMMs (QKV, output).

    The parameters have the names, global shapes and initial values of
    `flax.linen.MultiHeadDotProductAttention`, so both can load each other's
    checkpoints. The tokens are gathered once, in one AG+GEMM for queries, keys and
    values. The output projection is one GEMM+RS, which sums and scatters its result.
    The two calls are named "qkv" and "proj" in `initialize_ub`.

    The submodules are `query`, `key` and `value`, column-parallel `Linear` layers
    `[in, heads, head_dim]`; with `qk_norm_type` also `query_ln` and `key_ln`, an
    `nn.RMSNorm` or `nn.LayerNorm` over `head_dim`; and `out`, a row-parallel `Linear`,
    `[heads, head_dim, out_features]`.

    Transformer Engine: `te.MultiheadAttention`.

    Its attributes are the arguments of `jax_ub.flax.MultiHeadAttention` without the
    numbers of input features, except for these:

    Attributes:
        dropout_rate: the probability of dropping an attention weight. The PRNG stream
            is "dropout".
        deterministic: whether dropout is disabled; None takes the argument of the call.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    _: dataclasses.KW_ONLY
    is_causal: bool = False
    rotary_base: float | None = None
    qk_norm_type: str | None = None
    normalize_qk: bool = False
    attention_fn: Callable[..., jax.Array] | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        residual: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes attention and the output projection, plus an optional residual.

        Maps `[..., tokens, in]` to `[..., tokens, out_features]`.

        The arguments are those of `jax_ub.flax.MultiHeadAttention`. `deterministic`
        must be None if the module's attribute is set.
        """
        check_flags("MultiHeadAttention", self.linear_options())
        checks.check_rate("MultiHeadAttention", "dropout_rate", self.dropout_rate)
        checks.check_rank("MultiHeadAttention", "inputs_q", inputs_q)
        in_features = inputs_q.shape[-1]
        num_heads, out_features = self.num_heads, self.out_features
        num_kv_heads = num_heads if self.num_kv_heads is None else self.num_kv_heads
        qkv_features = in_features if self.qkv_features is None else self.qkv_features
        check_attention_sizes(num_heads, num_kv_heads, qkv_features, self.rotary_base)
        options = self.linear_options()
        out = Linear(
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            parallel="row",
            ub_name=userbuffers_name("proj", options),
            name="out",
            **options,
        )
        core = CoreAttention(
            out.sharding_layout,
            self.attention_fn,
            self.is_causal,
            self.rotary_base,
            self.dropout_rate,
            self.broadcast_dropout,
        )
        core.check_heads(num_heads, num_kv_heads, inputs_q)

        def column(name, heads):
            return Linear(
                (heads, qkv_features // num_heads),
                parallel="column",
                ub_name=userbuffers_name("qkv", options),
                name=name,
                **options,
            )

        layers = (
            column("query", num_heads),
            column("key", num_kv_heads),
            column("value", num_kv_heads),
        )
        inputs = (inputs_q, inputs_k, inputs_v)
        q, k, v = project_qkv(apply_layers, layers, inputs, self.rotary_base)
        norm = qk_norm_class(
            "MultiHeadAttention", self.qk_norm_type, self.normalize_qk, nn
        )
        if norm is not None:
            dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
            q = norm(name="query_ln", **dtypes)(q)
            k = norm(name="key_ln", **dtypes)(k)
        if self.is_initializing():
            if out.sharding_layout.is_local():  # zeros, as in Linear
                return out(q, residual=residual)
            core = dataclasses.replace(
                core, sharding_layout=out.sharding_layout.replicated()
            )
        if self.is_deterministic(deterministic, self.dropout_rate):
            key = None
        else:
            key = self.make_rng("dropout")
        y = core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return out(y, residual=residual)
