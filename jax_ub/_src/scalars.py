"""Tells whether a value is an integer, a number or a size. Imports no JAX."""

import math

import numpy as np

# The largest array dimension that is accepted. No memory holds an array of this size.
# The product of the size and a few small factors still fits into 64 bits.
LARGEST_SIZE = 1 << 40


def is_integer(value) -> bool:
    """Returns whether a value is an integer of at most 64 bits, and not a bool."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        return False
    return -(1 << 63) <= int(value) < 1 << 63


def is_number(value) -> bool:
    """Returns whether a value is a finite Python or NumPy number, and not a bool."""
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer outside the range of floats
        return False


def is_size(value) -> bool:
    """Returns whether a value is a valid dimension size: an integer in [1, 2**40]."""
    return is_integer(value) and 1 <= value <= LARGEST_SIZE
