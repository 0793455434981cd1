"""Settings of named overlaps. `from_te` reads them from Megatron's files."""

from jax_ub.overlap_config.config import CommOverlapType as CommOverlapType
from jax_ub.overlap_config.config import OverlapConfig as OverlapConfig
from jax_ub.overlap_config.config import (
    UserBufferQuantizationMode as UserBufferQuantizationMode,
)
from jax_ub.overlap_config.megatron import from_te as from_te
