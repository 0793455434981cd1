"""The linen layers that consist of norms, linear layers and attention."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from jax_ub._src import checks
from jax_ub._src.flax.attention import project_qkv, residual_blocks
from jax_ub._src.flax.core_attention import CoreAttention, dropout
from jax_ub._src.flax.linen_linear import Linear, TensorParallel
from jax_ub._src.flax.norm_layers import mlp
from jax_ub._src.flax.options import (
    check_attention_sizes,
    check_norm_inputs,
    check_norm_parallel,
    check_transformer_sizes,
    make_norm,
    norm_dtypes,
    qk_norm_class,
    resolve_activation,
)


class LayerNormLinear(TensorParallel):
    """The linen version of `jax_ub.flax.LayerNormLinear`: a norm and a `Linear`.

    The submodules are `norm`, an `nn.LayerNorm` or `nn.RMSNorm`, and `linear`.

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
        """Computes `linear(norm(inputs))`.

        Maps `[..., tokens, in]` to `[..., tokens, *features]`. With
        `return_layernorm_output`, returns a pair of the result and the normalized
        inputs.
        """
        op, options = "LayerNormLinear", self.checked_options()
        check_norm_parallel(op, self.parallel)
        checks.check_rank(op, "inputs", inputs, 1)
        check_norm_inputs(op, inputs.shape[-1], inputs, self)
        norm = make_norm(nn, op, self.normalization, self.epsilon, options, name="norm")
        normalized = norm(inputs)
        linear = Linear(
            self.features,
            parallel=self.parallel,
            ub_name=self.ub_name,
            name="linear",
            **options,
        )
        y = linear(normalized)
        return (y, normalized) if self.return_layernorm_output else y


class LayerNormMLP(TensorParallel):
    """The linen version of `jax_ub.flax.LayerNormMLP`: a norm followed by an MLP.

    The submodules are `norm`, an `nn.LayerNorm` or `nn.RMSNorm`; `fc1`; `gate`, for
    gated activations only; and `fc2`. The attributes are the arguments of
    `jax_ub.flax.LayerNormMLP`.

    Transformer Engine: `te.LayerNormMLP`.
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
        op, options = "LayerNormMLP", self.checked_options()
        checks.check_size(op, "hidden_size", self.hidden_size)
        checks.check_size(op, "ffn_hidden_size", self.ffn_hidden_size)
        activation, is_gated = resolve_activation(op, self.activation)
        check_norm_inputs(op, self.hidden_size, inputs, self)
        norm = make_norm(nn, op, self.normalization, self.epsilon, options, name="norm")
        normalized = norm(inputs)
        column = self.ffn_hidden_size, "column", "fc1"
        fc1 = self.inner_linear(*column, name="fc1")
        gate = self.inner_linear(*column, name="gate") if is_gated else None
        fc2 = self.inner_linear(self.hidden_size, "row", "fc2", name="fc2")
        return mlp(activation, (fc1, gate, fc2), normalized, residual)


class MultiHeadAttention(TensorParallel):
    """The linen version of the tensor-parallel `jax_ub.flax.MultiHeadAttention`.

    The parameters have the names, global shapes and initial values of
    `flax.linen.MultiHeadDotProductAttention`, so both can load each other's
    checkpoints. The submodules are `query`, `key`, `value` and `out`; with
    `qk_norm_type` also `query_ln` and `key_ln`, an `nn.RMSNorm` or `nn.LayerNorm`.

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
        """Computes attention and its output projection, and adds an optional residual.

        Maps `[..., tokens, in]` to `[..., tokens, out_features]`.

        The arguments are those of `jax_ub.flax.MultiHeadAttention`. `deterministic`
        must be None if the module's attribute is set.
        """
        op, options = "MultiHeadAttention", self.checked_options()
        checks.check_rate(op, "dropout_rate", self.dropout_rate)
        checks.check_rank(op, "inputs_q", inputs_q)
        in_features = inputs_q.shape[-1]
        num_heads, out_features = self.num_heads, self.out_features
        num_kv_heads = num_heads if self.num_kv_heads is None else self.num_kv_heads
        qkv_features = in_features if self.qkv_features is None else self.qkv_features
        check_attention_sizes(num_heads, num_kv_heads, qkv_features, self.rotary_base)
        out_features = in_features if out_features is None else out_features
        out = self.inner_linear(out_features, "row", "proj", axis=(-2, -1), name="out")
        core = CoreAttention(
            out.sharding_layout,
            self.attention_fn,
            self.is_causal,
            self.rotary_base,
            self.dropout_rate,
            self.broadcast_dropout,
        )
        core.check_heads(num_heads, num_kv_heads, inputs_q)

        head_dim, column = qkv_features // num_heads, ("column", "qkv")
        layers = (
            self.inner_linear((num_heads, head_dim), *column, name="query"),
            self.inner_linear((num_kv_heads, head_dim), *column, name="key"),
            self.inner_linear((num_kv_heads, head_dim), *column, name="value"),
        )
        inputs = (inputs_q, inputs_k, inputs_v)
        q, k, v = project_qkv(layers, inputs, self.rotary_base)
        norm = qk_norm_class(op, self.qk_norm_type, self.normalize_qk, nn)
        if norm is not None:
            dtypes = norm_dtypes(options)
            q = norm(name="query_ln", **dtypes)(q)
            k = norm(name="key_ln", **dtypes)(k)
        if self.is_initializing():
            if out.sharding_layout.is_local():  # zeros, as in Linear
                return out(q, residual=residual)
            core = dataclasses.replace(
                core, sharding_layout=out.sharding_layout.replicated()
            )
        is_dropped = not self.is_deterministic(deterministic, self.dropout_rate)
        key = self.make_rng("dropout") if is_dropped else None
        y = core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return out(y, residual=residual)


class TransformerLayer(TensorParallel):
    """The linen version of `jax_ub.flax.TransformerLayer`, a pre-norm layer.

    The submodules are `attention_norm`, an `nn.LayerNorm` or `nn.RMSNorm`; `attention`,
    a `MultiHeadAttention`; and `mlp`, a `LayerNormMLP`. The PRNG stream of dropout is
    "dropout".

    Transformer Engine: `te.TransformerLayer`.

    Its attributes are the arguments of `jax_ub.flax.TransformerLayer`, except for this:

    Attributes:
        deterministic: whether dropout is disabled; None takes the argument of the call.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    _: dataclasses.KW_ONLY
    num_gqa_groups: int | None = None
    kv_channels: int | None = None
    is_causal: bool = True
    rotary_base: float | None = None
    qk_norm_type: str | None = None
    normalize_qk: bool = False
    attention_fn: Callable[..., jax.Array] | None = None
    activation: str | Callable[[jax.Array], jax.Array] = "gelu"
    normalization: str = "LayerNorm"
    epsilon: float = 1e-6
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    deterministic: bool | None = None

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes attention and the MLP, and adds the input of each to its result.

        Maps `[..., tokens, hidden_size]` to the same shape.

        The arguments are those of `jax_ub.flax.TransformerLayer`. `deterministic` must
        be None if the module's attribute is set.
        """
        op, options = "TransformerLayer", self.checked_options()
        num_heads, kv_channels = self.num_attention_heads, self.kv_channels
        check_transformer_sizes(
            self.hidden_size, num_heads, self.num_gqa_groups, kv_channels
        )
        qk_norm_class(op, self.qk_norm_type, self.normalize_qk, nn)
        checks.check_rate(op, "hidden_dropout", self.hidden_dropout)
        checks.check_rate(op, "attention_dropout", self.attention_dropout)
        rates = self.hidden_dropout, self.attention_dropout
        deterministic = self.is_deterministic(deterministic, *rates)
        check_norm_inputs(op, self.hidden_size, inputs, self)
        attention = MultiHeadAttention(
            num_heads,
            None if kv_channels is None else kv_channels * num_heads,
            self.hidden_size,
            self.num_gqa_groups,
            is_causal=self.is_causal,
            rotary_base=self.rotary_base,
            qk_norm_type=self.qk_norm_type,
            normalize_qk=self.normalize_qk,
            attention_fn=self.attention_fn,
            dropout_rate=self.attention_dropout,
            name="attention",
            **options,
        )
        mlp_layer = LayerNormMLP(
            self.hidden_size,
            self.ffn_hidden_size,
            activation=self.activation,
            normalization=self.normalization,
            epsilon=self.epsilon,
            name="mlp",
            **options,
        )
        norm = make_norm(
            nn, op, self.normalization, self.epsilon, options, name="attention_norm"
        )
        attend = functools.partial(
            attention,
            norm(inputs),
            mask=mask,
            positions=positions,
            deterministic=deterministic,
        )
        is_dropped = self.hidden_dropout and not deterministic
        return residual_blocks(
            inputs, attend, mlp_layer, self._drop if is_dropped else None
        )

    @nn.nowrap
    def _drop(self, y):
        return dropout(y, self.hidden_dropout, self.make_rng("dropout"), self)
