"""A transformer layer of attention and MLP, each with a norm and a residual."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub._src import checks as shapes
from jax_ub._src.checks import axis_tuple
from jax_ub._src.flax import normalization as normalizations
from jax_ub._src.flax.dropout import drop
from jax_ub._src.flax.heads import check_layer_sizes
from jax_ub._src.flax.linear import check_options
from jax_ub._src.flax.linen.layer_norm_linear import make_norm
from jax_ub._src.flax.linen.layer_norm_mlp import LayerNormMLP
from jax_ub._src.flax.linen.multi_head_attention import MultiHeadAttention
from jax_ub._src.flax.linen.tensor_parallel import TensorParallel


class TransformerLayer(TensorParallel):
    """A pre-norm transformer layer: attention and an MLP, each with a residual.

    The layer runs four overlapped GEMMs, named "qkv", "proj", "fc1" and "fc2" in
    `initialize_ub`. Between "qkv" and "proj" the activations are sharded by heads,
    between "fc1" and "fc2" by features, and everywhere else by tokens.

    The submodules are `attention_norm`, an `nn.LayerNorm` or `nn.RMSNorm`; `attention`,
    a `MultiHeadAttention`; and `mlp`, a `LayerNormMLP`.

    Transformer Engine: `te.TransformerLayer`.

    Attributes:
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
        hidden_dropout: the dropout rate of the results of attention and MLP, with the
            PRNG stream "dropout". If it is 0, the calls "proj" and "fc2" add the
            residuals before rounding.
        attention_dropout: the probability of dropping an attention weight.
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
        """Computes attention and MLP, each added to its input as a residual.

        Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            mask: `[..., heads, tokens, tokens]`, or broadcastable to it; true where a
                token attends to another. With `is_causal`, later tokens are always
                masked.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            deterministic: whether dropout is disabled. Must be None if the module's
                attribute is set.

        Raises:
            ShapeContractError: if the number of ranks does not divide heads or
                features, the heads do not divide the features, the number of key heads
                does not divide the number of query heads, or a dropout rate is not in
                [0, 1).
            UnknownNameError: if an activation, norm, method or axis is unknown.
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
        """Returns whether this call applies no dropout.

        Initialization needs no `deterministic` argument.
        """
        drops = self.hidden_dropout > 0 or self.attention_dropout > 0
        is_told = self.deterministic is not None or deterministic is not None
        if not drops or (self.is_initializing() and not is_told):
            return True
        return nn.merge_param("deterministic", self.deterministic, deterministic)

    @nn.nowrap
    def _drop(self, y, keeps):
        if keeps:
            return y
        # Without sequence parallelism, all ranks have the same tokens and must draw the
        # same mask.
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
