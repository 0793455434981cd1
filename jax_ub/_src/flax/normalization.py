"""Selects and checks the norms that precede linear layers or follow projections."""

from collections.abc import Mapping
from typing import TypeVar

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.sharding.layout import resolve_kind

Norm = TypeVar("Norm")


def resolve(op: str, normalization: str, norms: Mapping[str, Norm]) -> Norm:
    """Looks up a norm's class by its name, "LayerNorm" or "RMSNorm".

    Raises:
        UnknownNameError: if the name is unknown.
    """
    if not isinstance(normalization, str) or normalization not in norms:
        raise UnknownNameError(
            f"{op}: normalization = {shown(normalization)} is not known. "
            f"{nearest(normalization, norms)}"
        )
    return norms[normalization]


QK_NORMS = ("RMSNorm", "LayerNorm")


def qk_norm(op: str, qk_norm_type: str | None, normalize_qk: bool) -> str | None:
    """Returns the name of the norm that is applied to queries and keys, or None.

    Args:
        op: the layer's name in error messages.
        qk_norm_type: Transformer Engine's argument.
        normalize_qk: Flax's argument; True means "LayerNorm".

    Raises:
        ConfigurationError: if both arguments are given.
        UnknownNameError: if the name of the norm is unknown, or `normalize_qk` is not a
            bool.
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
    """Checks that the linear layer after a norm is not row parallel.

    A norm needs all features of a token on one rank.

    Raises:
        UnsupportedOverlapError: if the layer is row parallel.
    """
    if parallel is not None and resolve_kind(op, parallel) == "row":
        raise UnsupportedOverlapError(
            f'{op}: parallel = "row" shards the features, which a norm needs whole. '
            'Use parallel="column", or a norm of its own before the layers that shard '
            "them."
        )


def check_features(op: str, num: int, inputs: jax.Array) -> None:
    """Checks that the inputs' last dimension has the size that a norm expects.

    Raises:
        ShapeContractError: if they do not.
    """
    shapes.check_array(op, "inputs", inputs)
    if inputs.shape[-1:] != (num,):
        raise ShapeContractError(
            f"{op}: inputs have shape {inputs.shape}, but the norm is for {num} "
            f"features. Pass [..., tokens, {num}]: all features of a token."
        )
