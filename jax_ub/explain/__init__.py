"""Explains which communication of a program overlaps, which does not, and why."""

from jax_ub.explain.table import Row as Row
from jax_ub.explain.table import Table as Table
