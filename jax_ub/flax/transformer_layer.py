"""A transformer layer: Transformer Engine's `TransformerLayer`."""

import functools
from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx

from jax_ub import shapes
from jax_ub.flax.dropout import drop
from jax_ub.flax.heads import check_layer_sizes
from jax_ub.flax.layer_norm_linear import make_norm, normalize
from jax_ub.flax.layer_norm_mlp import LayerNormMLP
from jax_ub.flax.linear import LinearOptions, check_options
from jax_ub.flax.multi_head_attention import MultiHeadAttention
from jax_ub.flax.normalization import qk_norm


class TransformerLayer(nnx.Module):
    """Attention, then an MLP, each of normalized inputs and added to what went in.

    Four calls, each a GEMM with its communication: "qkv", "proj", "fc1" and "fc2", as
    they are named in `initialize_ub`. Between them every rank has its own heads, or its
    own features of the MLP; before and after the layer it has its own tokens.

    Transformer Engine: `te.TransformerLayer`.

    Attributes:
        attention_norm: `nnx.LayerNorm` or `nnx.RMSNorm`.
        attention: `MultiHeadAttention`.
        mlp: `LayerNormMLP`.
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
        """Creates the parameters.

        Args:
            hidden_size: the number of features between layers.
            ffn_hidden_size: the global number of features inside the MLP.
            num_attention_heads: the global number of heads of the queries.
            num_gqa_groups: that of keys and values; None is the same.
            kv_channels: features of a head; None is `hidden_size /
                num_attention_heads`.
            is_causal: whether a token attends to none behind it.
            rotary_base: of rotary embeddings of queries and keys, for example 10000.0;
                None for none.
            qk_norm_type: the norm of queries and keys, before rotary embeddings:
                "RMSNorm", "LayerNorm", or None for none.
            normalize_qk: Flax's name for `qk_norm_type="LayerNorm"`.
            attention_fn: what attends; see `CoreAttention`.
            activation: of the MLP; see `LayerNormMLP`.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or the mean square, before its root.
            hidden_dropout: the share of what attention and MLP make that is dropped.
                Without it both add their inputs inside their calls.
            attention_dropout: the share of attention weights that is dropped.
            deterministic: whether nothing is dropped; `model.eval()` sets it.
            rngs: the random keys, with a stream "dropout" if anything is dropped.
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if heads or features do not divide into the ranks,
                features or query heads not into heads, or a dropout is no probability
                below 1.
            UnknownNameError: if there is no such activation, norm, method or axis.
        """
        check_options(
            TransformerLayer,
            options,
            rngs=rngs,
            is_causal=is_causal,
            normalize_qk=normalize_qk,
            deterministic=deterministic,
        )
        check_layer_sizes(hidden_size, num_attention_heads, num_gqa_groups, kv_channels)
        shapes.check_rate("TransformerLayer", "hidden_dropout", hidden_dropout)
        shapes.check_rate("TransformerLayer", "attention_dropout", attention_dropout)
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
            qk_norm_type=qk_norm("TransformerLayer", qk_norm_type, normalize_qk),
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
        """Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            mask: `[..., heads, tokens, tokens]`, with 1 for what is the same; true
                where a token attends to another. With `is_causal` those behind it are
                left out anyway.
            positions: of the tokens, `[..., tokens]`, for rotary embeddings; None
                counts them.
            deterministic: whether nothing is dropped; None is the module's.
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
        drop = functools.partial(self._drop, self.dropout, deterministic)
        x = inputs + drop(attend())
        return x + drop(self.mlp(x))

    def _drop(self, dropout, deterministic, y):
        """Drops elements of the result of a row layer."""
        keeps = dropout.deterministic if deterministic is None else deterministic
        if keeps:
            return y
        sharding_layout = self.mlp.fc2.sharding_layout
        # Without sequence parallelism ranks have the same tokens, and drop the same.
        same_axes = () if sharding_layout.sequence_parallel else sharding_layout.axes
        return drop(y, dropout.rate, dropout.rngs(), same_axes)
