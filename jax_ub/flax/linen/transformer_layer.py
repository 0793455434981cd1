"""A transformer layer: Transformer Engine's `TransformerLayer`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub import shapes
from jax_ub.flax import normalization as normalizations
from jax_ub.flax.dropout import drop
from jax_ub.flax.heads import check_layer_sizes
from jax_ub.flax.linear import check_options
from jax_ub.flax.linen.layer_norm_linear import make_norm
from jax_ub.flax.linen.layer_norm_mlp import LayerNormMLP
from jax_ub.flax.linen.multi_head_attention import MultiHeadAttention
from jax_ub.flax.linen.tensor_parallel import TensorParallel
from jax_ub.shapes import axis_tuple


class TransformerLayer(TensorParallel):
    """Attention, then an MLP, each of normalized inputs and added to what went in.

    Four calls, each a GEMM with its communication: "qkv", "proj", "fc1" and "fc2", as
    they are named in `initialize_ub`. Between them every rank has its own heads, or its
    own features of the MLP; before and after the layer it has its own tokens.

    Its submodules are `attention_norm`, `nn.LayerNorm` or `nn.RMSNorm`; `attention`,
    `MultiHeadAttention`; and `mlp`, `LayerNormMLP`.

    Transformer Engine: `te.TransformerLayer`.

    Attributes:
        hidden_size: the number of features between layers.
        ffn_hidden_size: the global number of features inside the MLP.
        num_attention_heads: the global number of heads of the queries.
        num_gqa_groups: that of keys and values; None is the same.
        kv_channels: features of a head; None is `hidden_size / num_attention_heads`.
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
        hidden_dropout: the share of what attention and MLP make that is dropped, by
            keys of the stream "dropout". Without it both add their inputs inside their
            calls.
        attention_dropout: the share of attention weights that is dropped.
        deterministic: whether nothing is dropped; None leaves it to the call.
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
        """Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            mask: `[..., heads, tokens, tokens]`, with 1 for what is the same; true
                where a token attends to another. With `is_causal` those behind it are
                left out anyway.
            positions: of the tokens, `[..., tokens]`, for rotary embeddings; None
                counts them.
            deterministic: whether nothing is dropped, where the module does not say it.

        Raises:
            ShapeContractError: if heads or features do not divide into the ranks,
                features or query heads not into heads, or a dropout is no probability
                below 1.
            UnknownNameError: if there is no such activation, norm, method or axis.
        """
        heads = self.num_attention_heads, self.num_gqa_groups
        check_options(TransformerLayer, self.linear_options())
        check_layer_sizes(self.hidden_size, *heads, self.kv_channels)
        for name in ("hidden_dropout", "attention_dropout"):
            shapes.check_rate("TransformerLayer", name, getattr(self, name))
        keeps = self._keeps(deterministic)
        normalizations.check_features("TransformerLayer", self.hidden_size, inputs)
        qk_norm_type = normalizations.qk_norm(
            "TransformerLayer", self.qk_norm_type, self.normalize_qk
        )
        attention, mlp = self._attention(qk_norm_type), self._mlp()
        norm = make_norm(self, "attention_norm", self.normalization, self.epsilon)
        attend = functools.partial(
            attention,
            norm(inputs),
            mask=mask,
            positions=positions,
            deterministic=keeps,
        )
        if self.hidden_dropout == 0:
            x = attend(residual=inputs)
            return mlp(x, residual=x)
        x = inputs + self._drop(attend(), keeps)
        return x + self._drop(mlp(x), keeps)

    @nn.nowrap
    def _keeps(self, deterministic):
        """Whether nothing is dropped; initialization need not be told."""
        drops = self.hidden_dropout > 0 or self.attention_dropout > 0
        is_told = self.deterministic is not None or deterministic is not None
        if not drops or (self.is_initializing() and not is_told):
            return True
        return nn.merge_param("deterministic", self.deterministic, deterministic)

    @nn.nowrap
    def _drop(self, y, keeps):
        if keeps:
            return y
        # Without sequence parallelism ranks have the same tokens, and drop the same.
        same_axes = () if self.sequence_parallel else axis_tuple(self.axis_name)
        return drop(y, self.hidden_dropout, self.make_rng("dropout"), same_axes)

    @nn.nowrap
    def _attention(self, qk_norm_type):
        heads, channels = self.num_attention_heads, self.kv_channels
        return MultiHeadAttention(
            heads,
            None if channels is None else channels * heads,
            self.hidden_size,
            self.num_gqa_groups,
            is_causal=self.is_causal,
            rotary_base=self.rotary_base,
            qk_norm_type=qk_norm_type,
            attention_fn=self.attention_fn,
            dropout_rate=self.attention_dropout,
            name="attention",
            **self.linear_options(),
        )

    @nn.nowrap
    def _mlp(self):
        return LayerNormMLP(
            self.hidden_size,
            self.ffn_hidden_size,
            activation=self.activation,
            normalization=self.normalization,
            epsilon=self.epsilon,
            name="mlp",
            **self.linear_options(),
        )
