"""`flax.nnx.MultiHeadAttention`, tensor parallel."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ub import shapes
from jax_ub.flax.core_attention import CoreAttention
from jax_ub.flax.heads import check_sizes, project
from jax_ub.flax.linear import (
    Linear,
    LinearOptions,
    call_together,
    check_options,
    userbuffers_name,
)
from jax_ub.flax.normalization import qk_norm
from jax_ub.retrofit.sharding_layout import ShardingLayout

_QK_NORMS: dict[str, Callable[..., Any]] = {
    "RMSNorm": nnx.RMSNorm,
    "LayerNorm": functools.partial(nnx.LayerNorm, use_bias=False),
}
_PLACEMENT = ("axis_name", "mesh", "data_axes", "sequence_parallel", "method")


class MultiHeadAttention(nnx.Module):
    """Multi-head attention whose heads are spread over the ranks.

    It has the parameters of `flax.nnx.MultiHeadAttention`, with the same names, global
    shapes and initial values, so that checkpoints swap. The tokens are gathered once,
    by one call that multiplies queries, keys and values; the GEMM of the output sums
    and scatters them. In `initialize_ub` the two calls have the names "qkv" and "proj".

    Transformer Engine: `te.MultiheadAttention`.

    Attributes:
        query: column parallel `Linear`, `[in_features, num_heads, head_dim]`.
        key: the same, `[in_kv_features, num_kv_heads, head_dim]`.
        value: as `key`.
        query_ln: `nnx.RMSNorm` or `nnx.LayerNorm` over `head_dim`, or None.
        key_ln: as `query_ln`.
        out: row parallel `Linear`, `[num_heads, head_dim, out_features]`.
    """

    def __init__(  # noqa: PLR0913, flax.nnx.MultiHeadAttention's arguments
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        is_causal: bool = False,
        rotary_base: float | None = None,
        qk_norm_type: str | None = None,
        normalize_qk: bool = False,
        attention_fn: Callable[..., jax.Array] | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates the parameters.

        Args:
            num_heads: the global number of heads of the queries.
            in_features: the number of features of the inputs.
            qkv_features: `num_heads * head_dim`; None is `in_features`.
            out_features: the number of features of the result; None is `in_features`.
            num_kv_heads: the global number of heads of keys and values, a divisor of
                `num_heads` (grouped queries); None is `num_heads`.
            in_kv_features: the number of features of the inputs of keys and values;
                None is `in_features`.
            is_causal: whether a token attends to none behind it.
            rotary_base: of rotary embeddings of queries and keys, for example 10000.0;
                None for none.
            qk_norm_type: the norm of queries and keys, before rotary embeddings:
                "RMSNorm", "LayerNorm", or None for none.
            normalize_qk: Flax's name for `qk_norm_type="LayerNorm"`.
            attention_fn: what attends; see `CoreAttention`.
            dropout_rate: the share of attention weights that is dropped.
            broadcast_dropout: whether all sequences and heads drop the same weights.
            deterministic: whether nothing is dropped; `model.eval()` sets it.
            rngs: the random keys, with a stream "dropout" if weights are dropped.
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if heads do not divide into the ranks, features or
                query heads not into heads, or `dropout_rate` is no probability below 1.
            UnknownNameError: if there is no such method or axis, or `attention_fn` is
                no function.
        """
        check_options(
            MultiHeadAttention,
            options,
            rngs=rngs,
            is_causal=is_causal,
            normalize_qk=normalize_qk,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
        )
        shapes.check_rate("MultiHeadAttention", "dropout_rate", dropout_rate)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        out_features = in_features if out_features is None else out_features
        check_sizes(num_heads, num_kv_heads, qkv_features, rotary_base)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = qkv_features // num_heads
        where: dict[str, Any] = {k: v for k, v in options.items() if k in _PLACEMENT}
        self.core = CoreAttention(
            ShardingLayout("row", **where),
            attention_fn,
            is_causal,
            rotary_base,
            dropout_rate,
            broadcast_dropout,
        )
        self.core.check_heads(num_heads, num_kv_heads)

        def column(size_in, heads):
            name = userbuffers_name("qkv", options)
            sizes = size_in, (heads, self.head_dim)
            return Linear(*sizes, parallel="column", ub_name=name, rngs=rngs, **options)

        self.query = column(in_features, num_heads)
        self.key = column(in_kv_features, num_kv_heads)
        self.value = column(in_kv_features, num_kv_heads)
        self.query_ln: nnx.RMSNorm | nnx.LayerNorm | None = nnx.data(None)
        self.key_ln: nnx.RMSNorm | nnx.LayerNorm | None = nnx.data(None)
        qk_norm_type = qk_norm("MultiHeadAttention", qk_norm_type, normalize_qk)
        if qk_norm_type is not None:
            norm = functools.partial(
                _QK_NORMS[qk_norm_type],
                self.head_dim,
                dtype=options.get("dtype"),
                param_dtype=options.get("param_dtype", jnp.float32),
                rngs=rngs,
            )
            self.query_ln, self.key_ln = norm(), norm()
        self.out = Linear(
            (num_heads, self.head_dim),
            out_features,
            parallel="row",
            ub_name=userbuffers_name("proj", options),
            rngs=rngs,
            **options,
        )
        self.deterministic = deterministic
        self.rngs: nnx.RngStream | None = nnx.data(None)
        if dropout_rate > 0:
            self.rngs = rngs.dropout.fork()

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
        """Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

        Args:
            inputs_q: the inputs of the queries.
            inputs_k: those of the keys; None takes `inputs_q`.
            inputs_v: those of the values; None takes `inputs_k`.
            mask: `[..., heads, tokens, tokens of inputs_k]`, with 1 for what is the
                same; true where a query attends to a key.
            positions: of the tokens, `[..., tokens]`, for rotary embeddings; None
                counts them.
            residual: what is added to the result inside its call.
            deterministic: whether nothing is dropped; None is the module's.

        Raises:
            UnsupportedOverlapError: for rotary embeddings of two different inputs.
        """
        kernel = self.query.kernel[...]
        self.core.check_heads(self.num_heads, self.num_kv_heads, kernel, inputs_q)
        layers = (self.query, self.key, self.value)
        inputs = (inputs_q, inputs_k, inputs_v)
        q, k, v = project(call_together, layers, inputs, self.core.rotary_base)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        keeps = self.deterministic if deterministic is None else deterministic
        key = None if self.rngs is None or keeps else self.rngs()
        y = self.core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return self.out(y, residual=residual)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets what `nnx.view` is told.

        Args:
            deterministic: whether nothing is dropped; None leaves it as it is.
        """
        if deterministic is not None:
            self.deterministic = deterministic
