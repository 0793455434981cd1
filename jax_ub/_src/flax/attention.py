"""The nnx layer `MultiHeadAttention`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ub._src import checks
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.flax.core_attention import CoreAttention
from jax_ub._src.flax.linear import Linear, apply_layers
from jax_ub._src.flax.options import (
    LinearOptions,
    check_attention_sizes,
    check_options,
    qk_norm_class,
    userbuffers_name,
)
from jax_ub._src.sharding.layout import ShardingLayout

_LAYOUT_OPTIONS = ("axis_name", "mesh", "data_axes", "sequence_parallel", "method")


def project_qkv(
    apply_layers: Callable[[Sequence[Any], jax.Array], tuple[jax.Array, ...]],
    layers: Sequence[Any],
    inputs: Sequence[Any],
    rotary_base: float | None,
) -> tuple[jax.Array, ...]:
    """Computes queries, keys and values; layers with the same input share one AG+GEMM.

    Args:
        apply_layers: applies several layers to the same input.
        layers: the layers of queries, keys and values.
        inputs: the inputs of queries, keys and values; None takes the previous one.
        rotary_base: base of the rotary embeddings, or None.
    """
    inputs_q, inputs_k, inputs_v = inputs
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, array in zip("qkv", (inputs_q, inputs_k, inputs_v), strict=True):
        checks.check_rank("MultiHeadAttention", f"inputs_{name}", array)
    if inputs_k is not inputs_q and rotary_base is not None:
        raise UnsupportedOverlapError(
            "MultiHeadAttention: rotary_base is given, but inputs_k differ from "
            "inputs_q, so queries and keys have different positions. Use "
            "rotary_base=None for attention to other inputs."
        )
    query, key, value = layers
    if inputs_k is inputs_q and inputs_v is inputs_k:
        return apply_layers(layers, inputs_q)
    if inputs_v is inputs_k:
        return (query(inputs_q), *apply_layers((key, value), inputs_k))
    return query(inputs_q), key(inputs_k), value(inputs_v)


class MultiHeadAttention(nnx.Module):
    """Multi-head attention that overlaps its two tensor-parallel GEMMs (QKV, output).

    The parameters have the names, global shapes and initial values of
    `flax.nnx.MultiHeadAttention`, so both can load each other's checkpoints. The tokens
    are gathered once, in one AG+GEMM for queries, keys and values. The output
    projection is one GEMM+RS, which sums and scatters its result. The two calls are
    named "qkv" and "proj" in `initialize_ub`.

    Transformer Engine: `te.MultiheadAttention`.

    Attributes:
        query: column-parallel `Linear`, `[in_features, num_heads, head_dim]`.
        key: column-parallel `Linear`, `[in_kv_features, num_kv_heads, head_dim]`.
        value: column-parallel `Linear` with the shape of `key`.
        query_ln: norm of the queries over `head_dim`, `nnx.RMSNorm` or
            `nnx.LayerNorm`, or None.
        key_ln: norm of the keys over `head_dim`, or None.
        out: row-parallel `Linear`, `[num_heads, head_dim, out_features]`.
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
        """Creates the projections and, if enabled, the norms with their parameters.

        Args:
            num_heads: the global number of query heads.
            in_features: the number of input features.
            qkv_features: `num_heads * head_dim`; None takes `in_features`.
            out_features: the number of output features; None takes `in_features`.
            num_kv_heads: the global number of key and value heads, which must divide
                `num_heads` (grouped-query attention); None takes `num_heads`.
            in_kv_features: the number of input features of keys and values; None takes
                `in_features`.
            is_causal: whether a token attends only to itself and earlier tokens.
            rotary_base: base of the rotary embeddings of queries and keys, for example
                10000.0; None disables them.
            qk_norm_type: the norm that is applied to queries and keys before rotary
                embeddings: "RMSNorm", "LayerNorm", or None.
            normalize_qk: True has the same effect as `qk_norm_type="LayerNorm"`; Flax's
                argument.
            attention_fn: the attention function; see `CoreAttention`.
            dropout_rate: the probability of dropping an attention weight.
            broadcast_dropout: whether all sequences and heads drop the same weights.
            deterministic: whether dropout is disabled; `model.eval()` sets it to True.
            rngs: the PRNG streams for the initializers; with dropout also "dropout".
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if the number of ranks does not divide the heads, the
                heads do not divide `qkv_features`, `num_kv_heads` does not divide
                `num_heads`, or `dropout_rate` is not in [0, 1).
            UnknownNameError: if the method or the axis is unknown, or `attention_fn` is
                not callable.
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
        checks.check_rate("MultiHeadAttention", "dropout_rate", dropout_rate)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        out_features = in_features if out_features is None else out_features
        check_attention_sizes(num_heads, num_kv_heads, qkv_features, rotary_base)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = qkv_features // num_heads
        layout: dict[str, Any] = {
            name: value for name, value in options.items() if name in _LAYOUT_OPTIONS
        }
        self.core = CoreAttention(
            ShardingLayout("row", **layout),
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
        norm = qk_norm_class("MultiHeadAttention", qk_norm_type, normalize_qk, nnx)
        if norm is not None:
            dtypes = options.get("dtype"), options.get("param_dtype", jnp.float32)
            self.query_ln, self.key_ln = (
                norm(self.head_dim, dtype=dtypes[0], param_dtype=dtypes[1], rngs=rngs)
                for _ in range(2)
            )
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
        """Computes attention and the output projection, plus an optional residual.

        Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

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
            deterministic: whether dropout is disabled; None takes the module's value.

        Raises:
            UnsupportedOverlapError: if rotary embeddings are enabled and the inputs of
                queries and keys differ.
        """
        kernel = self.query.kernel[...]
        self.core.check_heads(self.num_heads, self.num_kv_heads, kernel, inputs_q)
        layers = (self.query, self.key, self.value)
        inputs = (inputs_q, inputs_k, inputs_v)
        q, k, v = project_qkv(apply_layers, layers, inputs, self.core.rotary_base)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        if deterministic is None:
            deterministic = self.deterministic
        key = None if self.rngs is None or deterministic else self.rngs()
        y = self.core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return self.out(y, residual=residual)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets whether dropout is disabled; `nnx.view` calls this method.

        Args:
            deterministic: whether dropout is disabled; None keeps the current value.
        """
        if deterministic is not None:
            self.deterministic = deterministic
