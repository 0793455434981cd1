"""Runs a user's Python script for the commands `trace` and `explain`."""

import argparse
import pathlib
import runpy
import sys
import zipfile
from collections.abc import Sequence

from jax_ub._src.errors import UbError, shown

# The entries of a parsed command line that are not public options of a command.
_NO_OPTIONS = {"command", "part", "program", "run"}


class ScriptError(UbError, ValueError):
    """Raised if a script does not exist, cannot be read or is not Python source."""


def split_program(program: list[str]) -> list[str]:
    """Removes the leading "--", which argparse keeps before Python 3.13."""
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


def check_script(
    command: str, path: str, fix: str = "Give the path of a Python script."
) -> None:
    """Checks that Python can run `path`: a file, or a folder with `__main__.py`."""
    found = pathlib.Path(path)
    try:
        exists = found.is_file() or (found / "__main__.py").is_file()
    except (OSError, ValueError):  # path too long, or with a null byte
        exists = False
    if not exists:
        raise ScriptError(f"{command}: there is no script {shown(path)}. {fix}")


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Runs a Python script as `__main__` and returns its exit status."""
    _check_source(script)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        sys.stderr.write(f"{end.code}\n")  # as Python does, with exit status 1
        return 1
    return 0


def _check_source(script):
    """Reports a syntax error in one line, unless the script is compiled or zipped."""
    path = pathlib.Path(script)
    if not path.is_file() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        return
    try:
        compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(
            f"{shown(script)} cannot be run: {error}. Give a Python script."
        ) from error
