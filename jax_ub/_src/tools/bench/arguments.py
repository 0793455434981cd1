"""Parsers for the benchmark's command-line options, used as `type=` of argparse."""

import argparse
from collections.abc import Callable
from typing import Any

from jax_ub._src.errors import UbError, UnknownNameError, nearest, shown


def list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns an argparse type that parses comma-separated values to a tuple.

    `read` parses each value. A `UbError` that it raises becomes an argparse error.
    """

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(read(part) for part in text.split(","))
        except UbError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def names_of(known: dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    """Returns an argparse type that parses comma-separated names to a tuple.

    Each name must be a key of `known`; the error for another name suggests the nearest
    key.
    """

    def read(name: str) -> str:
        if name not in known:
            raise UnknownNameError(
                f"{shown(name)} is not known. {nearest(name, known)}"
            )
        return name

    return list_of(read)


def positive(text: str) -> int:
    """Parses a positive decimal integer; for use as an argparse `type`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive number")
    return value
