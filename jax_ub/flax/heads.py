"""Queries, keys and values of attention heads."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_ub.errors import ShapeContractError, UnsupportedOverlapError


def project(
    call_together: Callable[[Sequence[Any], jax.Array], tuple[jax.Array, ...]],
    layers: Sequence[Any],
    inputs: Sequence[Any],
    rotary_base: float | None,
) -> tuple[jax.Array, ...]:
    """Multiplies what shares its inputs in one call.

    Args:
        call_together: calls several layers on the same inputs.
        layers: those of queries, keys and values.
        inputs: theirs; None takes the one before.
        rotary_base: None where positions do not matter.

    Returns:
        queries, keys and values.

    Raises:
        UnsupportedOverlapError: for rotary embeddings of two different inputs.
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
    """Refuses features or query heads that do not divide into heads."""
    if num_heads % num_kv_heads:
        raise ShapeContractError(
            f"MultiHeadAttention: num_heads = {num_heads} is no multiple of "
            f"num_kv_heads = {num_kv_heads}. Every key has an equal number of queries: "
            f"give num_heads = {-(-num_heads // num_kv_heads) * num_kv_heads}."
        )
    if qkv_features % num_heads:
        raise ShapeContractError(
            f"MultiHeadAttention: qkv_features = {qkv_features} is no multiple of "
            f"num_heads = {num_heads}. Give qkv_features = "
            f"{-(-qkv_features // num_heads) * num_heads}."
        )
    head_dim = qkv_features // num_heads
    if rotary_base is not None and head_dim % 2:
        raise ShapeContractError(
            f"MultiHeadAttention: qkv_features = {qkv_features} gives {num_heads} "
            f"heads of {head_dim} features, but rotary embeddings take features in "
            f"pairs. Give qkv_features = {num_heads * (head_dim + 1)}."
        )
