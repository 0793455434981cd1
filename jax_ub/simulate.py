"""Deprecated: private. Use `python -m jax_ub simulate`."""

import warnings

from jax_ub._src.tools.simulate import *  # noqa: F403

warnings.warn(
    "jax_ub.simulate is private and will be removed in the next release. Use "
    "`python -m jax_ub simulate`.",
    DeprecationWarning,
    stacklevel=2,
)
