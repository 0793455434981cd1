"""Commands that inspect, measure and start programs of jax_ub."""

import argparse
import errno
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from jax_ub._src.errors import UbError, nearest, shown
from jax_ub._src.output import version_of

_NAME = "python -m jax_ub"
# Maps each command to the summary that --help shows. The module of a command defines
# its options, and is imported only if the command runs.
_COMMANDS = {
    "doctor": "checks the installation, the devices and every method",
    "bench": "compares the speed of every op with XLA",
    "launch": "starts a program in several processes on this machine",
    "tune": "selects the fastest method of each linear layer on this machine",
    "trace": "records what each rank does, for Perfetto",
    "explain": "lists which communication of a program overlaps, and why not",
    "simulate": "predicts the gain of a model on GPUs",
}
# The `errno` values of a failed write, for example to a full disk. The commands in
# `_WITHOUT_PROGRAM` report such an error in one line. The other commands run a user's
# program, which may have raised the error, so they show a traceback.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_WITHOUT_PROGRAM = ("doctor", "bench", "tune", "simulate")
_EPILOG = """\
exit status:
  0        success
  1        doctor found a fault, or stdout cannot be written
  2        invalid arguments, or another error of jax_ub, whose text is on stderr
  124      launch: the time of --timeout is over
  128 + n  signal n: 130 after Ctrl-C, 141 if the reader of stdout has exited
explain, trace and launch return the status of their program, if it is not 0.

docs/commands.md describes the commands.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `python -m jax_ub`, such as "doctor".

    Returns:
        The exit status, as listed at the end of `python -m jax_ub --help`.
    """
    given = None
    try:
        given = _parse(sys.argv[1:] if arguments is None else list(arguments))
        return _flush(given.run(given))
    except UbError as error:
        if _is_from_program(error):  # a traceback shows the line of the program
            raise
        # Omits the note that JAX adds about hidden frames of the traceback, because the
        # traceback is not printed.
        given_notes = getattr(error, "__notes__", ())
        notes = [note for note in given_notes if not note.startswith("-----")]
        print(f"{_NAME}: error: {error}", *notes, sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if _has_reader(sys.stdout):  # a pipe of the program that explain or trace ran
            raise
        _discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in _FULL and given and given.command in _WITHOUT_PROGRAM:
            return _report_unwritable(error)
        raise


def _parse(arguments):
    """Parses a command line, and imports the module of its command."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=style,
    )
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("jax_ub", "jax"))
    parser.add_argument("--version", action="version", version=versions)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen is not None and chosen not in _COMMANDS:
        parser.error(
            f"there is no command {shown(chosen)}. {nearest(chosen, _COMMANDS)}"
        )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, formatter_class=style)
        if name == chosen:
            module = _module_of(name)
            subparser.description = module.__doc__
            subparser.epilog = f"example:\n  {_NAME} {module.EXAMPLE}"
            module.add_arguments(subparser)
    try:
        given, unknown = parser.parse_known_args(arguments)
    except SystemExit as end:  # of --help, --version or an invalid argument
        end.code = _flush(end.code)
        raise
    if unknown:
        # The error is reported by the command's parser, which prints the usage of the
        # command. The main parser would print the usage of `python -m jax_ub`.
        text = f"unrecognized arguments: {' '.join(unknown)}"
        commands.choices[given.command].error(text)
    return given


def _module_of(name):
    """Imports the module of a command: tools/NAME.py or tools/NAME/command.py."""
    if name != "launch":
        importlib.import_module("jax.extend")  # before any program is traced
    module = importlib.import_module(f"jax_ub._src.tools.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{module.__name__}.command")
    return module


def _flush(status):
    """Flushes stdout. Returns 1 if this fails and `status` is 0, and else `status`."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # for example, a full disk
        if status == 0:  # otherwise the command has already reported an error
            return _report_unwritable(error)
        _discard(sys.stdout)
    return status


def _report_unwritable(error):
    _discard(sys.stdout)
    print(f"cannot write to stdout: {error.strerror}", file=sys.stderr)
    return 1


def _is_from_program(error):
    """Returns whether an error comes from the script of `explain` or `trace`."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "runpy" for frame, _ in frames)


def _has_reader(output):
    asking = select.poll()
    asking.register(output, 0)
    return not asking.poll(0)  # poll reports an error if the other end is closed


def _discard(output):
    """Redirects a failed output to /dev/null, so that a flush at exit does not fail."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), output.fileno())


if __name__ == "__main__":
    sys.exit(main())
