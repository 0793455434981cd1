"""`initialize_ub` and `destroy_ub` create and free named overlaps and their buffers."""

from jax_ub.initialize.lifecycle import destroy_ub as destroy_ub
from jax_ub.initialize.lifecycle import get_ub as get_ub
from jax_ub.initialize.lifecycle import initialize_ub as initialize_ub
from jax_ub.initialize.lifecycle import is_ub_initialized as is_ub_initialized
