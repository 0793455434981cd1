"""Tensor-parallel `flax.linen.MultiHeadDotProductAttention`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from jax_ub._src import checks as shapes
from jax_ub._src.flax import normalization as normalizations
from jax_ub._src.flax.core_attention import CoreAttention
from jax_ub._src.flax.heads import check_sizes, project
from jax_ub._src.flax.linear import check_options, userbuffers_name
from jax_ub._src.flax.linen.linear import Linear, call_together
from jax_ub._src.flax.linen.tensor_parallel import TensorParallel


class MultiHeadAttention(TensorParallel):
    """Multi-head attention whose heads are sharded over the ranks.

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

    Attributes:
        num_heads: the global number of query heads.
        qkv_features: `num_heads * head_dim`; None takes the number of input features.
        out_features: the number of output features; None takes the number of input
            features.
        num_kv_heads: the global number of key and value heads, which must divide
            `num_heads` (grouped-query attention); None takes `num_heads`.
        is_causal: whether a token attends only to itself and earlier tokens.
        rotary_base: base of the rotary embeddings of queries and keys, for example
            10000.0; None disables them.
        qk_norm_type: the norm that is applied to queries and keys before rotary
            embeddings: "RMSNorm", "LayerNorm", or None.
        normalize_qk: True has the same effect as `qk_norm_type="LayerNorm"`; Flax's
            argument.
        attention_fn: the attention function; see `CoreAttention`.
        dropout_rate: the probability of dropping an attention weight. The PRNG stream
            is "dropout".
        broadcast_dropout: whether all sequences and heads drop the same weights.
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
        """Computes multi-head attention, adding an optional residual.

        Maps `[..., tokens, in]` to `[..., tokens, out_features]`.

        Args:
            inputs_q: the inputs of the queries.
            inputs_k: the inputs of the keys; None takes `inputs_q`.
            inputs_v: the inputs of the values; None takes `inputs_k`.
            mask: `[..., heads, tokens, tokens of inputs_k]`, or broadcastable to it;
                true where a query attends to a key.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            residual: array with the shape of the result. The output projection adds it
                inside its fused call, before rounding.
            deterministic: whether dropout is disabled. Must be None if the module's
                attribute is set.

        Raises:
            ShapeContractError: if the number of ranks does not divide the heads, the
                heads do not divide `qkv_features`, `num_kv_heads` does not divide
                `num_heads`, or `dropout_rate` is not in [0, 1).
            UnsupportedOverlapError: if rotary embeddings are enabled and the inputs of
                queries and keys differ.
            UnknownNameError: if the method or the axis is unknown, or `attention_fn` is
                not callable.
        """
        check_options(MultiHeadAttention, self.linear_options())
        shapes.check_rate("MultiHeadAttention", "dropout_rate", self.dropout_rate)
        shapes.check_rank("MultiHeadAttention", "inputs_q", inputs_q, 1)
        in_features = inputs_q.shape[-1]
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        qkv_features, out_features = self.qkv_features, self.out_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        check_sizes(num_heads, num_kv_heads, qkv_features, self.rotary_base)
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
        q, k, v = project(call_together, layers, inputs, self.rotary_base)
        qk_norm_type = normalizations.qk_norm(
            "MultiHeadAttention", self.qk_norm_type, self.normalize_qk
        )
        if qk_norm_type is not None:
            make_norm = functools.partial(self._make_norm, qk_norm_type)
            q, k = make_norm("query_ln")(q), make_norm("key_ln")(k)
        if self.is_initializing():
            if out.sharding_layout.is_local():  # zeros, as in Linear
                return out(q, residual=residual)
            core = dataclasses.replace(
                core, sharding_layout=out.sharding_layout.whole()
            )
        key = self._dropout_key(deterministic)
        y = core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return out(y, residual=residual)

    @nn.nowrap
    def _dropout_key(self, deterministic):
        is_told = self.deterministic is not None or deterministic is not None
        if self.dropout_rate == 0 or (self.is_initializing() and not is_told):
            return None
        keeps = nn.merge_param("deterministic", self.deterministic, deterministic)
        return None if keeps else self.make_rng("dropout")

    @nn.nowrap
    def _make_norm(self, qk_norm_type, name):
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        if qk_norm_type == "RMSNorm":
            return nn.RMSNorm(name=name, **dtypes)
        return nn.LayerNorm(use_bias=False, name=name, **dtypes)
