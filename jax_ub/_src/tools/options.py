"""Parsers of command-line options, and the optional packages that options need."""

import argparse
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from jax_ub._src.errors import (
    UbError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)


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


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns an argparse type that parses comma-separated names out of `known`."""
    names = tuple(known)

    def read(name: str) -> str:
        if name not in names:
            raise UnknownNameError(
                f"{shown(name)} is not known. {nearest(name, names)}"
            )
        return name

    return list_of(read)


def positive(text: str) -> int:
    """Parses a positive decimal integer; for use as an argparse `type`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive number")
    return value


def load_extra(package: str, option: str) -> Any:
    """Imports a package of the extra `bench`, which `option` needs.

    Raises:
        UnsupportedOverlapError: if it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UnsupportedOverlapError(
            f"{option} requires {package}, which is not installed. Install it with: "
            "pip install 'jax_ub[bench]'"
        ) from error


def load_pyplot(option: str) -> Any:
    """Imports pyplot with a backend that writes files and needs no display."""
    load_extra("matplotlib", option).use("Agg")
    return importlib.import_module("matplotlib.pyplot")
