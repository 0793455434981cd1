"""Explains what overlaps in a program, what does not, and why."""

from jax_ub.explain.table import Row as Row
from jax_ub.explain.table import Table as Table
