"""The linen layer `TransformerLayer`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub._src import checks
from jax_ub._src.checks import axis_tuple
from jax_ub._src.flax.core_attention import dropout
from jax_ub._src.flax.linen_layers import LayerNormMLP, MultiHeadAttention, make_norm
from jax_ub._src.flax.linen_linear import TensorParallel
from jax_ub._src.flax.options import (
    check_flags,
    check_norm_inputs,
    check_transformer_sizes,
    qk_norm_class,
)


class TransformerLayer(TensorParallel):
    """A pre-norm transformer layer: attention and an MLP, each with a residual.

    The layer runs four overlapped GEMMs, named "qkv", "proj", "fc1" and "fc2" in
    `initialize_ub`. Between "qkv" and "proj" the activations are sharded by heads,
    between "fc1" and "fc2" by features, and everywhere else by tokens.

    The submodules are `attention_norm`, an `nn.LayerNorm` or `nn.RMSNorm`; `attention`,
    a `MultiHeadAttention`; and `mlp`, a `LayerNormMLP`.

    Transformer Engine: `te.TransformerLayer`.

    Its attributes are the arguments of `jax_ub.flax.TransformerLayer`, except for
    these:

    Attributes:
        hidden_dropout: the dropout rate of the results of attention and MLP, with the
            PRNG stream "dropout". If it is 0, the calls "proj" and "fc2" add the
            residuals before rounding.
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

        The arguments are those of `jax_ub.flax.TransformerLayer`. `deterministic` must
        be None if the module's attribute is set.
        """
        options = self.linear_options()
        num_heads, kv_channels = self.num_attention_heads, self.kv_channels
        check_flags("TransformerLayer", options)
        check_transformer_sizes(
            self.hidden_size, num_heads, self.num_gqa_groups, kv_channels
        )
        qk_norm_class("TransformerLayer", self.qk_norm_type, self.normalize_qk, nn)
        for name in ("hidden_dropout", "attention_dropout"):
            checks.check_rate("TransformerLayer", name, getattr(self, name))
        rates = self.hidden_dropout, self.attention_dropout
        deterministic = self.is_deterministic(deterministic, *rates)
        check_norm_inputs("TransformerLayer", self.hidden_size, inputs, self)
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
        mlp = LayerNormMLP(
            self.hidden_size,
            self.ffn_hidden_size,
            activation=self.activation,
            normalization=self.normalization,
            epsilon=self.epsilon,
            name="mlp",
            **options,
        )
        norm = make_norm(self, "attention_norm", self.normalization, self.epsilon)
        attend = functools.partial(
            attention,
            norm(inputs),
            mask=mask,
            positions=positions,
            deterministic=deterministic,
        )
        if self.hidden_dropout == 0:
            x = attend(residual=inputs)
            return mlp(x, residual=x)
        x = inputs + self._drop(attend(), deterministic)
        return x + self._drop(mlp(x), deterministic)

    @nn.nowrap
    def _drop(self, y, deterministic):
        if deterministic:
            return y
        # Without sequence parallelism, all ranks have the same tokens and must draw the
        # same mask.
        replicated_axes = () if self.sequence_parallel else axis_tuple(self.axis_name)
        key = self.make_rng("dropout")
        return dropout(y, self.hidden_dropout, key, replicated_axes)
