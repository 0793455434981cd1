"""The command line: `python -m jax_ub doctor`, `bench`, `explain` and the others."""

import argparse
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence

from jax_ub._src.errors import UbError
from jax_ub._src.tools.bench import command as bench
from jax_ub._src.tools.doctor import command as doctor
from jax_ub._src.tools.explain import command as explain
from jax_ub._src.tools.launch import command as launch
from jax_ub._src.tools.simulate import command as simulate
from jax_ub._src.tools.trace import command as trace
from jax_ub._src.tools.tune import command as tune

_COMMANDS = {
    "doctor": (doctor, "says what is installed, what can run here, and why not"),
    "bench": (bench, "times every op against XLA"),
    "launch": (launch, "runs a program in several processes on this machine"),
    "tune": (tune, "finds the fastest way to run each linear on this machine"),
    "trace": (trace, "records what every rank does when, for Perfetto and as PNG"),
    "explain": (explain, "says what overlaps in a program, what does not, and why"),
    "simulate": (simulate, "says what overlapping is worth on another machine"),
}


# Errors of a full disk. Commands that run no user program report them in one line.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_WITHOUT_PROGRAM = ("doctor", "bench", "tune", "simulate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `python -m jax_ub`, such as `doctor` or `bench`.

    Returns:
        The exit status: 0 for success, 1 if the doctor found a fault, 2 for invalid
        arguments or another `UbError`. 128 + n, as in shells, for signal n: SIGINT
        after Ctrl-C, SIGPIPE if the reader of stdout has closed the pipe, as `head`
        does.
    """
    parser = argparse.ArgumentParser(prog="python -m jax_ub", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=summary, description=module.__doc__)
        )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        # Shows the usage of the command; argparse would show that of the main parser.
        text = f"unrecognized arguments: {' '.join(unknown)}"
        commands.choices[given.command].error(text)
    try:
        status = given.run(given)
        return _flush(status)
    except UbError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if _has_reader(sys.stdout):  # a pipe of the program that explain or trace ran
            raise
        _drop(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in _FULL and given.command in _WITHOUT_PROGRAM:
            return _say_full(error)
        raise


def _flush(status):
    """Flushes stdout, so that a closed pipe or a full disk is reported before exit."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # for example, a full disk
        if status == 0:  # otherwise the command has already reported an error
            return _say_full(error)
        _drop(sys.stdout)
    return status


def _say_full(error):
    _drop(sys.stdout)
    print(f"cannot write to stdout: {error.strerror}", file=sys.stderr)
    return 1


def _has_reader(output):
    asking = select.poll()
    asking.register(output, 0)
    return not asking.poll(0)  # poll reports an error if the other end is closed


def _drop(output):
    """Discards buffered output, because Python would fail to flush it at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), output.fileno())


if __name__ == "__main__":
    sys.exit(main())
