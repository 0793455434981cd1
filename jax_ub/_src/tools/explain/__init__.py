"""Explains which communication of a program overlaps, which does not, and why."""

from jax_ub._src.tools.explain.table import Row as Row
from jax_ub._src.tools.explain.table import Table as Table
