"""Computes queries, keys and values, and checks sizes of attention layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown


def project(
    call_together: Callable[[Sequence[Any], jax.Array], tuple[jax.Array, ...]],
    layers: Sequence[Any],
    inputs: Sequence[Any],
    rotary_base: float | None,
) -> tuple[jax.Array, ...]:
    """Computes queries, keys and values. Those with the same input share one call.

    One call of several layers gathers the input only once.

    Args:
        call_together: calls several layers on the same inputs.
        layers: the layers of queries, keys and values.
        inputs: the inputs of queries, keys and values; None takes the previous one.
        rotary_base: base of the rotary embeddings, or None.

    Returns:
        queries, keys and values.

    Raises:
        UnsupportedOverlapError: if rotary embeddings are enabled and the inputs of
            queries and keys differ.
    """
    inputs_q, inputs_k, inputs_v = inputs
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    if inputs_k is not inputs_q and rotary_base is not None:
        raise UnsupportedOverlapError(
            "MultiHeadAttention: rotary_base with inputs_k that are not inputs_q: "
            "the positions of queries and keys would not be the same. Use "
            "rotary_base=None for attention to other inputs."
        )
    query, key, value = layers
    if inputs_k is inputs_q and inputs_v is inputs_k:
        return call_together(layers, inputs_q)
    (q,) = call_together((query,), inputs_q)
    if inputs_v is inputs_k:
        return (q, *call_together((key, value), inputs_k))
    return (q, *call_together((key,), inputs_k), *call_together((value,), inputs_v))


def check_sizes(
    num_heads: int, num_kv_heads: int, qkv_features: int, rotary_base: float | None
) -> None:
    """Checks the numbers of heads and features of an attention layer.

    Raises:
        ShapeContractError: if a size is not a positive integer, heads or features do
            not divide evenly, or `rotary_base` is invalid.
    """
    op = "MultiHeadAttention"
    shapes.check_size(op, "num_heads", num_heads)
    shapes.check_size(op, "num_kv_heads", num_kv_heads)
    shapes.check_size(op, "qkv_features", qkv_features)
    if num_heads % num_kv_heads:
        raise ShapeContractError(
            f"{op}: num_heads = {num_heads} is no multiple of num_kv_heads = "
            f"{num_kv_heads}. Every key has an equal number of queries: give num_heads "
            f"= {-(-num_heads // num_kv_heads) * num_kv_heads}."
        )
    if qkv_features % num_heads:
        raise ShapeContractError(
            f"{op}: qkv_features = {qkv_features} is no multiple of num_heads = "
            f"{num_heads}. Give qkv_features = "
            f"{-(-qkv_features // num_heads) * num_heads}."
        )
    if rotary_base is None:
        return
    if not shapes.is_number(rotary_base) or not rotary_base > 0:
        raise ShapeContractError(
            f"{op}: rotary_base = {shown(rotary_base)} is not a positive number. Pass "
            "one, for example 10000.0, or None for no rotary embeddings."
        )
    head_dim = qkv_features // num_heads
    if head_dim % 2:
        raise ShapeContractError(
            f"{op}: qkv_features = {qkv_features} gives {num_heads} heads of "
            f"{head_dim} features, but rotary embeddings take features in pairs. Give "
            f"qkv_features = {num_heads * (head_dim + 1)}."
        )


def check_layer_sizes(
    hidden_size: int,
    num_attention_heads: int,
    num_gqa_groups: int | None,
    kv_channels: int | None,
) -> None:
    """Checks the numbers of heads and features of a transformer layer.

    Raises:
        ShapeContractError: if a size is not a positive integer, or the heads do not
            divide `hidden_size` and `kv_channels` is None.
    """
    op = "TransformerLayer"
    shapes.check_size(op, "hidden_size", hidden_size)
    shapes.check_size(op, "num_attention_heads", num_attention_heads)
    if num_gqa_groups is not None:
        shapes.check_size(op, "num_gqa_groups", num_gqa_groups)
    if kv_channels is not None:
        shapes.check_size(op, "kv_channels", kv_channels)
    elif hidden_size % num_attention_heads:
        padded = -(-hidden_size // num_attention_heads) * num_attention_heads
        raise ShapeContractError(
            f"{op}: hidden_size = {hidden_size} is no multiple of num_attention_heads "
            f"= {num_attention_heads}. Give hidden_size = {padded}, or kv_channels, "
            "the features of a head."
        )
