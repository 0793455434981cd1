"""Argument types of the benchmark command lines: lists, known names, counts."""

import argparse
from collections.abc import Callable
from typing import Any

from jax_ub.errors import UbError, UnknownNameError, nearest, shown


def list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns an argparse type for comma-separated values, each parsed by `read`."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(read(part) for part in text.split(","))
        except UbError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def names_of(known: dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    """Returns an argparse type for comma-separated names, all of them in `known`."""

    def read(name: str) -> str:
        if name not in known:
            raise UnknownNameError(
                f"{shown(name)} is not known. {nearest(name, known)}"
            )
        return name

    return list_of(read)


def positive(text: str) -> int:
    """Parses a positive integer."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive number")
    return value
