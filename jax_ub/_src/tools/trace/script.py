"""Runs a user's Python script for the commands `trace` and `explain`."""

import pathlib
import runpy
import sys
import zipfile

from jax_ub._src.errors import UbError, shown


class ScriptError(UbError, ValueError):
    """Raised when a program cannot be read or is not Python source."""


def is_script(path: str) -> bool:
    """Returns whether Python can run `path`: a file, or a folder with `__main__.py`."""
    found = pathlib.Path(path)
    try:
        return found.is_file() or (found / "__main__.py").is_file()
    except (OSError, ValueError):  # path too long, or with a null byte
        return False


def run_script(script: str, arguments: list[str]) -> int:
    """Runs a Python script as `__main__`, until it ends or calls `sys.exit`.

    Returns:
        The script's exit status.

    Raises:
        ScriptError: if the file cannot be read or is not Python source.
    """
    _check_source(script)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _status(end.code)
    return 0


def _check_source(script):
    """Compiles the script without running it, to report syntax errors in one line.

    A precompiled file or zip archive is not checked.
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


def _status(code):
    # As in Python, an exit code that is neither None nor a number is printed and
    # means failure.
    if code is None or isinstance(code, int):
        return int(code or 0)
    sys.stderr.write(f"{code}\n")
    return 1
