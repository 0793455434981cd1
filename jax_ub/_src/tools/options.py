"""Values and parsers of command-line options, and the packages that options need."""

import argparse
import dataclasses
import importlib
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jax_ub._src.checks import is_size
from jax_ub._src.errors import (
    ShapeContractError,
    UbError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.files import checked_output
from jax_ub._src.methods import Method

_SHAPE_TEXT = re.compile(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", re.ASCII)


def value_of(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns an argparse `type` that calls `read` with the text of an option.

    If `read` raises a `UbError`, argparse prints its message and the usage, and exits.
    """

    def parse(text: str) -> Any:
        try:
            return read(text)
        except UbError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns an argparse `type` for comma-separated values, each parsed by `read`."""
    return value_of(lambda text: tuple(map(read, text.split(","))))


def name_of(known: Iterable[str]) -> Callable[[str], str]:
    """Returns an argparse `type` for names in `known`; errors suggest the nearest."""
    names = tuple(known)

    def read(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(
                f"{shown(name)} is not known. {nearest(name, names)}"
            )
        return name

    return read


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    return list_of(name_of(known))


method_option = name_of(method.value for method in Method)  # an argparse `type`


def positive(text: str) -> int:
    # `int` raises an error for texts of more than 4300 digits.
    if not (text.isdecimal() and len(text) < 4300 and is_size(int(text))):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a positive integer. Give a number, such as 2."
        )
    return int(text)


def amount_of(unit: str) -> Callable[[str], float]:
    """Returns an argparse `type` that parses a positive finite number of this unit."""

    def read(text: str) -> float:
        value = _float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a number of {unit}. Give a positive number."
            )
        return value

    return read


def seconds(text: str) -> float:
    value = _float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a number of seconds. Give a number of at least 0."
        )
    return value


def _float(text):
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclasses.dataclass(frozen=True)
class Shape:
    """The global sizes of a GEMM: x [M, K] times w [K, N], with M tokens."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M}x{self.K}x{self.N}"

    @property
    def flops(self) -> int:
        return 2 * self.M * self.K * self.N

    @property
    def row(self) -> "Shape":
        """Returns the sizes of the row-parallel layer that follows: K and N swap."""
        return Shape(self.M, self.N, self.K)

    def sizes(self, dimensions: str) -> tuple[int, ...]:
        """Returns the shape of an array by its dimensions: (M, K) for "MK"."""
        return tuple(getattr(self, name) for name in dimensions)

    def bytes(self, dtype: Any, out_dtype: Any = None) -> int:
        """Returns the total size of x, w and the result of the GEMM, in bytes."""
        operands = np.dtype(dtype).itemsize * self.K * (self.M + self.N)
        return operands + np.dtype(out_dtype or dtype).itemsize * self.M * self.N

    def divides(self, num_ranks: int) -> bool:
        return not any(size % num_ranks for size in (self.M, self.K, self.N))


def parse_shape(text: str) -> Shape:
    """Parses a shape in the format `MxKxN`, such as 512x1024x2816."""
    match = _SHAPE_TEXT.fullmatch(text.strip())
    sizes = [int(size) for size in match.groups()] if match else [0]
    if 0 in sizes:
        raise ShapeContractError(
            f"shape {shown(text)} is not MxKxN with positive sizes. Write, for "
            "example, 512x1024x2816."
        )
    return Shape(*sizes)


def check_divides(command: str, shape: Shape, num_ranks: int, option: str) -> None:
    """Raises an error unless `num_ranks`, a value of `option`, divides M, K and N."""
    if not shape.divides(num_ranks):
        raise ShapeContractError(
            f"{command}: shape {shape} does not divide into {num_ranks} ranks. Take "
            f"sizes that are multiples of {num_ranks}, or leave {num_ranks} out of "
            f"{option}."
        )


output_path = value_of(checked_output)  # an argparse `type`


def replaced_path(text: str) -> pathlib.Path:
    """Parses the path of a file that the command reads and replaces."""
    path = output_path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a regular file. Name a file."
        )
    return path


def load_extra(package: str, option: str) -> Any:
    """Imports a package of the extra `jax_ub[bench]`, or says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UnsupportedOverlapError(
            f"{option} requires {package}, which is not installed. Install it with: "
            "pip install 'jax_ub[bench]'"
        ) from error
