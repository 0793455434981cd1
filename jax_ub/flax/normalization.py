"""Norms before linear layers, by the names that Transformer Engine gives them."""

from collections.abc import Mapping
from typing import TypeVar

import jax

from jax_ub import shapes
from jax_ub.errors import (
    ConfigurationError,
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.retrofit.sharding_layout import resolve_kind

Norm = TypeVar("Norm")


def resolve(op: str, normalization: str, norms: Mapping[str, Norm]) -> Norm:
    """Finds a norm.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    if not isinstance(normalization, str) or normalization not in norms:
        raise UnknownNameError(
            f"{op}: normalization = {shown(normalization)} is not known. "
            f"{nearest(normalization, norms)}"
        )
    return norms[normalization]


QK_NORMS = ("RMSNorm", "LayerNorm")


def qk_norm(op: str, qk_norm_type: str | None, normalize_qk: bool) -> str | None:
    """Returns the norm of queries and keys, None for none.

    Args:
        op: the layer, for errors.
        qk_norm_type: Transformer Engine's argument.
        normalize_qk: Flax's argument, which stands for "LayerNorm".

    Raises:
        ConfigurationError: if both arguments are given.
        UnknownNameError: if there is no norm of that name, or `normalize_qk` is
            neither true nor false.
    """
    shapes.check_flag(op, "normalize_qk", normalize_qk)
    if qk_norm_type is None:
        return "LayerNorm" if normalize_qk else None
    if qk_norm_type not in QK_NORMS:
        raise UnknownNameError(
            f"{op}: qk_norm_type = {shown(qk_norm_type)} is not known. "
            f"{nearest(str(qk_norm_type), QK_NORMS)} None normalizes nothing."
        )
    if normalize_qk:
        raise ConfigurationError(
            f'{op}: qk_norm_type = "{qk_norm_type}" and normalize_qk = True, which is '
            'Flax\'s name for qk_norm_type="LayerNorm". Leave normalize_qk out.'
        )
    return qk_norm_type


def check_parallel(op: str, parallel: str | None) -> None:
    """Refuses a linear layer whose inputs no norm before it could have whole."""
    if parallel is not None and resolve_kind(op, parallel) == "row":
        raise UnsupportedOverlapError(
            f'{op}: parallel = "row" shards the features, which a norm needs whole. '
            'Use parallel="column", or a norm of its own before the layers that shard '
            "them."
        )


def check_features(op: str, num: int, inputs: jax.Array) -> None:
    """Refuses inputs that have another number of features than the norm, or none."""
    shapes.check_array(op, "inputs", inputs)
    if inputs.shape[-1:] != (num,):
        raise ShapeContractError(
            f"{op}: inputs have shape {inputs.shape}, but the norm is for {num} "
            f"features. Pass [..., tokens, {num}]: all features of a token."
        )
