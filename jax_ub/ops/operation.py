"""Deprecated: these names are in `jax_ub.ops`."""

import warnings

from jax_ub._src.ops.fused_operation import *  # noqa: F403
from jax_ub._src.ops.operation import *  # noqa: F403

warnings.warn(
    "jax_ub.ops.operation will be removed in the next release. Import the names from "
    "jax_ub.ops.",
    DeprecationWarning,
    stacklevel=2,
)
