"""Runs a program of the user's inside a command that watches it."""

import pathlib
import runpy
import sys


def is_script(path: str) -> bool:
    """Whether Python can run it: a file, or a folder with a `__main__.py`."""
    found = pathlib.Path(path)
    return found.is_file() or (found / "__main__.py").is_file()


def run_script(script: str, arguments: list[str]) -> int:
    """Runs a script as `__main__`, until it ends or calls `sys.exit`.

    Returns:
        Its exit status.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _status(end.code)
    return 0


def _status(code):
    # As Python does it: anything else is a message, and a failure.
    if code is None or isinstance(code, int):
        return int(code or 0)
    sys.stderr.write(f"{code}\n")
    return 1
