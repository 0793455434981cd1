"""What all commands share on the command line.

That is the values of options and their parsers, the output as text or JSON, and the
user's Python program, which `trace` and `explain` run.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from jax_ub._src.errors import (
    ShapeContractError,
    UbError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.methods import Method
from jax_ub._src.output import checked_output, write_json
from jax_ub._src.runtime import settings
from jax_ub._src.scalars import is_size

STDOUT = pathlib.Path("-")  # value of --json that prints the document
STDERR = 2  # file descriptor, because sys.stderr may be an object without one
_SHAPE_TEXT = re.compile(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", re.ASCII)
_MOST_DIGITS = 13  # of 2**40
_LEAST_AMOUNT, _MOST_AMOUNT = 1e-3, 1e9
_COLORS = {"red": 31, "green": 32, "yellow": 33}
# Attributes of the parsed arguments that are not public options such as `--json`.
# `note_misplaced_options` ignores them.
_NO_OPTIONS = {"command", "module", "part", "program", "run"}
_Case = TypeVar("_Case")


class ScriptError(UbError, ValueError):
    """Raised if a program does not exist, cannot be read or is not Python source."""


def value_of(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns an argparse `type` that parses the text of an option by `read`.

    If `read` raises a `UbError`, argparse prints its message and the usage, and exits.
    """

    def parse(text: str) -> Any:
        try:
            return read(text)
        except UbError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns an argparse `type` for comma-separated values, each parsed by `read`.

    A value that is given twice counts once.
    """
    return value_of(lambda text: tuple(dict.fromkeys(map(read, text.split(",")))))


def name_of(known: Iterable[str]) -> Callable[[str], str]:
    """Returns an argparse `type` for `known` names, which suggests the nearest one."""
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
    digits = text.lstrip("0") if text.isdecimal() else ""
    # Only the first digits are parsed, because `int` raises an error for a text of more
    # than 4300 digits.
    value = int(digits[:_MOST_DIGITS] or 0)
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a positive integer. Give a number, such as 2."
        )
    if len(digits) > _MOST_DIGITS or not is_size(value):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is too large. Give at most 2**40."
        )
    return value


def amount_of(unit: str) -> Callable[[str], float]:
    """Returns an argparse `type` for a positive number of `unit`, such as GB/s.

    The number must be in a range in which quotients of amounts and sizes are finite.
    """

    def read(text: str) -> float:
        value = _float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a number of {unit}. Give a positive number."
            )
        if not _LEAST_AMOUNT <= value <= _MOST_AMOUNT:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} {unit} is out of range. Give a number from "
                f"{_LEAST_AMOUNT:g} to {_MOST_AMOUNT:g}."
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
        """Returns the sizes of the row-parallel layer that follows: K and N swapped."""
        return Shape(self.M, self.N, self.K)

    def sizes(self, dimensions: str) -> tuple[int, ...]:
        """Returns the sizes of the named dimensions, such as (M, K) for "MK"."""
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
            f"shape {shown(text)} is not MxKxN with positive sizes of at most 9 "
            "digits. Write, for example, 512x1024x2816."
        )
    return Shape(*sizes)


def check_divides(command: str, shape: Shape, num_ranks: int, option: str) -> None:
    """Raises an error that names `option` unless `num_ranks` divides M, K and N."""
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
    """Imports an optional package, or raises an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UnsupportedOverlapError(
            f"{option} requires {package}, which is not installed. Install it with: "
            "pip install 'jax_ub[bench]'"
        ) from error


def add_json(
    parser: argparse.ArgumentParser, what: str, *, has_program: bool = False
) -> None:
    """Adds the option `--json [FILE]`. The help says that it writes `what` as JSON.

    Without FILE, or if it is "-", the JSON replaces the table on stdout. FILE is
    required before the path of a program, which argparse would take for FILE.
    """
    file: dict[str, Any] = {} if has_program else {"nargs": "?", "const": STDOUT}
    text = f'write {what} to FILE as JSON; "-" prints it in place of the table'
    parser.add_argument("--json", type=_json_path, metavar="FILE", help=text, **file)


def _json_path(text: str) -> pathlib.Path:
    # The path is made absolute, because a program may change the working directory.
    return STDOUT if text == "-" else output_path(text).absolute()


def check_json_differs(command: str, given: argparse.Namespace, option: str) -> None:
    """Raises an error if `--json` and another option name the same file."""
    path = getattr(given, option)
    if None in (given.json, path) or given.json == STDOUT:
        return
    if given.json.resolve() == path.resolve():
        raise UnsupportedOverlapError(
            f"{command}: --json and --{option} both name {shown(str(path))}. Name two "
            "files."
        )


def say(given: argparse.Namespace, text: str, end: str = "\n") -> None:
    """Prints a text to stdout, unless `--json` sends the JSON document there."""
    if given.json != STDOUT:
        _show_progress("")
        sys.stdout.write(f"{text}{end}")


def write(
    given: argparse.Namespace, document: Any, *, is_complete: bool = True
) -> None:
    """Writes `document` as JSON to the file or stdout, if `--json` asks for it.

    An incomplete document is written to a file only, so that an interrupted command
    leaves its results.
    """
    if given.json == STDOUT and is_complete:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif given.json not in (None, STDOUT):
        write_json(given.json, document)


def program_stdout(given: argparse.Namespace) -> Any:
    """Returns a context that redirects stdout to stderr if `--json` uses stdout."""
    is_needed = given.json == STDOUT
    return contextlib.redirect_stdout(sys.stderr if is_needed else sys.stdout)


def colored(text: str, color: str | None) -> str:
    """Returns `text` in a color if stdout is a terminal and `NO_COLOR` is not set."""
    if color is None or settings.no_color() or not _is_terminal(sys.stdout):
        return text
    return f"\033[{_COLORS[color]}m{text}\033[0m"


def progress(command: str, cases: Sequence[_Case]) -> Iterator[_Case]:
    """Yields the cases, and shows progress on a terminal, such as "bench: 2 of 9"."""
    try:
        for number, case in enumerate(cases, start=1):
            _show_progress(f"{command}: {number} of {len(cases)}")
            yield case
            sys.stdout.flush()
    finally:
        _show_progress("")


def progress_file() -> int:
    """Returns the `stdout` argument of `subprocess` for processes that print progress.

    Their output goes to stderr if that is a terminal, and is discarded otherwise.
    """
    return STDERR if os.isatty(STDERR) else subprocess.DEVNULL


def _show_progress(text):
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\033[K{text}\r")
        sys.stderr.flush()


def _is_terminal(stream):
    return stream.isatty() and not settings.is_dumb_terminal()


def add_module(parser: argparse.ArgumentParser) -> None:
    """Adds the option `-m`, with which the program is a module, not a script."""
    text = "run a module, not a script"
    parser.add_argument("-m", dest="module", action="store_true", help=text)


def split_program(program: list[str]) -> list[str]:
    """Removes a leading "--", which argparse keeps before Python 3.13."""
    return program[program[:1] == ["--"] :]


def note_misplaced_options(
    command: str, given: argparse.Namespace, arguments: Sequence[str]
) -> None:
    """Prints a note if options of the command come after the path of the script.

    Such options are passed to the script. No note is printed for options after "--",
    which are meant for it.
    """
    names = vars(given).keys() - _NO_OPTIONS
    known = {f"--{name.replace('_', '-')}" for name in names}
    end = [*arguments, "--"].index("--")
    words = dict.fromkeys(word.partition("=")[0] for word in arguments[:end])
    found = ", ".join(word for word in words if word in known)
    if found:
        sys.stderr.write(
            f"{command}: note: the script gets {found}. Options of {command} itself "
            "precede the script.\n"
        )


def check_program(command: str, program: str, *, is_module: bool) -> None:
    """Raises an error if the script, or the package of the module, does not exist."""
    if is_module and not _has_package(program):
        raise ScriptError(
            f"{command}: there is no module {shown(program)}. Give a name as after "
            "`python -m`."
        )
    # Python also runs a folder that contains a file `__main__.py`.
    paths = program, os.path.join(program, "__main__.py")
    if not is_module and not any(map(os.path.isfile, paths)):
        raise ScriptError(
            f"{command}: there is no script {shown(program)}. To run a module, put "
            "-m before it."
        )


def _has_package(module):
    try:  # does not import the package, which may start JAX's backend
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # no name
        return False


def run_program(
    program: str, arguments: Sequence[str], *, is_module: bool = False
) -> int:
    """Runs a script or a module as `__main__` and returns its exit status."""
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _check_source(program)
            sys.path.insert(0, str(pathlib.Path(program).resolve().parent))
            # `__file__` gets this path. It is absolute, as with `python SCRIPT`,
            # because the script may change the working directory.
            runpy.run_path(os.path.abspath(program), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        sys.stderr.write(f"{end.code}\n")  # as Python does, with exit status 1
        return 1
    return 0


def _check_source(script):
    """Raises a one-line error, without a traceback, if a script is not valid Python.

    Compiled and zipped scripts are not checked.
    """
    path = pathlib.Path(script)
    if not path.is_file() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        return
    try:
        compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(
            f"{shown(script)} cannot be run: {error}. Give a Python script."
        ) from error
