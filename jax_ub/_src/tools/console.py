"""What all commands share: the option `--json`, colors, and progress on a terminal."""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from jax_ub._src.files import write_json
from jax_ub._src.runtime import settings
from jax_ub._src.tools.options import output_path

STDOUT = pathlib.Path("-")  # value of --json that prints the document
STDERR = 2  # file descriptor, because sys.stderr may be an object without one
_COLORS = {"red": 31, "green": 32, "yellow": 33}
_Case = TypeVar("_Case")


def add_json(
    parser: argparse.ArgumentParser, what: str, *, has_program: bool = False
) -> None:
    """Adds the option `--json [FILE]`, which writes `what` as JSON.

    Without FILE, or if it is "-", the JSON replaces the table on stdout. FILE is
    required before the path of a program, which argparse would take for FILE.
    """
    file: dict[str, Any] = {} if has_program else {"nargs": "?", "const": STDOUT}
    text = f'write {what} to FILE as JSON; "-" prints it in place of the table'
    parser.add_argument("--json", type=_json_path, metavar="FILE", help=text, **file)


def _json_path(text: str) -> pathlib.Path:
    return STDOUT if text == "-" else output_path(text)


def say(given: argparse.Namespace, text: str, end: str = "\n") -> None:
    """Prints a text to stdout, unless `--json` sends the JSON document there."""
    if given.json != STDOUT:
        _show_progress("")
        sys.stdout.write(f"{text}{end}")


def write(
    given: argparse.Namespace, document: Any, *, is_complete: bool = True
) -> None:
    """Writes a JSON document to the file or stdout that `--json` names, if it is given.

    An incomplete document is written to a file only. An interrupted command leaves it.
    """
    if given.json == STDOUT and is_complete:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif given.json not in (None, STDOUT):
        write_json(given.json, document)


def program_stdout(given: argparse.Namespace) -> Any:
    """Returns a context in which `print` writes to stderr if `--json` needs stdout."""
    is_needed = given.json == STDOUT
    return contextlib.redirect_stdout(sys.stderr if is_needed else sys.stdout)


def colored(text: str, color: str | None) -> str:
    """Returns a text in a color if stdout is a terminal and `NO_COLOR` is not set."""
    if color is None or settings.no_color() or not _is_terminal(sys.stdout):
        return text
    return f"\033[{_COLORS[color]}m{text}\033[0m"


def progress(command: str, cases: Sequence[_Case]) -> Iterator[_Case]:
    """Yields the cases; shows "bench: 2 of 9" and so on if stderr is a terminal."""
    try:
        for number, case in enumerate(cases, start=1):
            _show_progress(f"{command}: {number} of {len(cases)}")
            yield case
            sys.stdout.flush()
    finally:
        _show_progress("")


def progress_file() -> int:
    """Returns `stdout` for `subprocess` children that print progress: stderr or none.

    The output goes to stderr if that is a terminal, and is discarded otherwise.
    """
    return STDERR if os.isatty(STDERR) else subprocess.DEVNULL


def _show_progress(text):
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\033[K{text}\r")
        sys.stderr.flush()


def _is_terminal(stream):
    return stream.isatty() and not settings.is_dumb_terminal()
