"""Settings of named overlaps. `from_te` reads them from Megatron's files."""

from jax_ub._src.config.overlap_config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
)
from jax_ub._src.config.ub_cfgs import from_te

__all__ = [
    "CommOverlapType",
    "OverlapConfig",
    "UserBufferQuantizationMode",
    "from_te",
]
