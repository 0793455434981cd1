"""Fusible operations, by the names of Transformer Engine."""

from jax_ub.ops.operation import BasicOperation as BasicOperation
from jax_ub.ops.operation import FusedOperation as FusedOperation
