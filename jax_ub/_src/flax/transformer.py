"""The nnx layer `TransformerLayer`."""

import functools
from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx

from jax_ub._src import checks
from jax_ub._src.flax.attention import MultiHeadAttention
from jax_ub._src.flax.core_attention import dropout
from jax_ub._src.flax.norm_layers import LayerNormMLP, make_norm, normalize
from jax_ub._src.flax.options import (
    LinearOptions,
    check_options,
    check_transformer_sizes,
    qk_norm_class,
)


class TransformerLayer(nnx.Module):
    """A pre-norm transformer layer: attention and an MLP, each with a residual.

    The layer runs four overlapped GEMMs, named "qkv", "proj", "fc1" and "fc2" in
    `initialize_ub`. Between "qkv" and "proj" the activations are sharded by heads,
    between "fc1" and "fc2" by features, and everywhere else by tokens.

    Transformer Engine: `te.TransformerLayer`.

    Attributes:
        attention_norm: the norm before the attention, `nnx.LayerNorm` or `nnx.RMSNorm`.
        attention: the `MultiHeadAttention`.
        mlp: the `LayerNormMLP`, which contains the norm before the MLP.
    """

    def __init__(  # noqa: PLR0913, of attention, norms and MLP
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        is_causal: bool = True,
        rotary_base: float | None = None,
        qk_norm_type: str | None = None,
        normalize_qk: bool = False,
        attention_fn: Callable[..., jax.Array] | None = None,
        activation: str | Callable[[jax.Array], jax.Array] = "gelu",
        normalization: str = "LayerNorm",
        epsilon: float = 1e-6,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates attention, MLP and norms with their parameters.

        Args:
            hidden_size: the number of input and output features.
            ffn_hidden_size: the global number of features inside the MLP.
            num_attention_heads: the global number of query heads.
            num_gqa_groups: the global number of key and value heads; None takes
                `num_attention_heads`.
            kv_channels: the number of features of a head; None takes `hidden_size /
                num_attention_heads`.
            is_causal: whether a token attends only to itself and earlier tokens.
            rotary_base: base of the rotary embeddings of queries and keys, for example
                10000.0; None disables them.
            qk_norm_type: the norm that is applied to queries and keys before rotary
                embeddings: "RMSNorm", "LayerNorm", or None.
            normalize_qk: True has the same effect as `qk_norm_type="LayerNorm"`; Flax's
                argument.
            attention_fn: the attention function; see `CoreAttention`.
            activation: the activation function of the MLP; see `LayerNormMLP`.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or to the mean square, before the root.
            hidden_dropout: the dropout rate of the results of attention and MLP. If it
                is 0, the calls "proj" and "fc2" add the residuals before rounding.
            attention_dropout: the probability of dropping an attention weight.
            deterministic: whether dropout is disabled; `model.eval()` sets it to True.
            rngs: the PRNG streams for the initializers; with dropout also "dropout".
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if the number of ranks does not divide heads or
                features, the heads do not divide the features, the number of key heads
                does not divide the number of query heads, or a dropout rate is not in
                [0, 1).
            UnknownNameError: if an activation, norm, method or axis is unknown.
        """
        check_options(
            TransformerLayer,
            options,
            rngs=rngs,
            is_causal=is_causal,
            normalize_qk=normalize_qk,
            deterministic=deterministic,
        )
        check_transformer_sizes(
            hidden_size, num_attention_heads, num_gqa_groups, kv_channels
        )
        qk_norm_class("TransformerLayer", qk_norm_type, normalize_qk, nnx)
        checks.check_rate("TransformerLayer", "hidden_dropout", hidden_dropout)
        checks.check_rate("TransformerLayer", "attention_dropout", attention_dropout)
        self.attention_norm = make_norm(
            "TransformerLayer",
            normalization,
            hidden_size,
            epsilon=epsilon,
            rngs=rngs,
            options=options,
        )
        features = None if kv_channels is None else kv_channels * num_attention_heads
        self.attention = MultiHeadAttention(
            num_attention_heads,
            hidden_size,
            features,
            hidden_size,
            num_gqa_groups,
            is_causal=is_causal,
            rotary_base=rotary_base,
            qk_norm_type=qk_norm_type,
            normalize_qk=normalize_qk,
            attention_fn=attention_fn,
            dropout_rate=attention_dropout,
            deterministic=deterministic,
            rngs=rngs,
            **options,
        )
        self.mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            activation=activation,
            normalization=normalization,
            epsilon=epsilon,
            rngs=rngs,
            **options,
        )
        self.dropout: nnx.Dropout | None = nnx.data(None)
        if hidden_dropout > 0:
            self.dropout = nnx.Dropout(
                hidden_dropout, deterministic=deterministic, rngs=rngs
            )

    def __call__(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes attention and MLP, each added to its input as a residual.

        Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            mask: `[..., heads, tokens, tokens]`, or broadcastable to it; true where a
                token attends to another. With `is_causal`, later tokens are always
                masked.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            deterministic: whether dropout is disabled; None takes the module's value.
        """
        attend = functools.partial(
            self.attention,
            normalize("TransformerLayer", self.attention_norm, inputs),
            mask=mask,
            positions=positions,
            deterministic=deterministic,
        )
        if self.dropout is None:
            x = attend(residual=inputs)
            return self.mlp(x, residual=x)
        if deterministic is None:
            deterministic = self.dropout.deterministic
        drop = functools.partial(self._drop, self.dropout, deterministic)
        x = inputs + drop(attend())
        return x + drop(self.mlp(x))

    def _drop(self, module, deterministic, y):
        if deterministic:
            return y
        layout = self.mlp.fc2.sharding_layout
        # Without sequence parallelism, all ranks have the same tokens and must draw the
        # same mask.
        replicated_axes = () if layout.sequence_parallel else layout.axes
        return dropout(y, module.rate, module.rngs(), replicated_axes)
