"""Deprecated: private. Use `python -m jax_ub simulate`."""

import warnings

from jax_ub._src.prediction.estimate import Prediction as Prediction
from jax_ub._src.prediction.hardware import HARDWARE as HARDWARE
from jax_ub._src.prediction.hardware import Hardware as Hardware
from jax_ub._src.prediction.hardware import host as host
from jax_ub._src.tools.deprecated import estimate as estimate
from jax_ub._src.tools.deprecated import predict as predict
from jax_ub._src.tools.models import MODELS as MODELS

warnings.warn(
    "jax_ub.simulate is private and will be removed in the next release. Use "
    "`python -m jax_ub simulate`.",
    DeprecationWarning,
    stacklevel=2,
)
