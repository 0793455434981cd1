"""FP8 recipes and their state. `ub.quantize` makes FP8 arrays of type `ScaledArray`."""

from jax_ub._src.fp8.quantize import quantize_params
from jax_ub._src.fp8.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    RowwiseScaling,
)
from jax_ub._src.fp8.state import apply_updates, init_state

__all__ = [
    "DelayedScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "QParams",
    "RowwiseScaling",
    "apply_updates",
    "init_state",
    "quantize_params",
]
