"""Explains which calls of a program overlap.

Runs the program and prints a row for each compiled call of jax_ub, with the reason if
it does not overlap, and for each collective of XLA that could be one call with the dot
next to it. The table shows how long ranks waited in each call.
"""

import argparse
import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from jax_ub._src.errors import UbError, shown
from jax_ub._src.lowering_log import recording
from jax_ub._src.prediction.hardware import HARDWARE
from jax_ub._src.runtime import cpu_engine, settings
from jax_ub._src.tools import command_line
from jax_ub._src.tools.explain import hlo, program
from jax_ub._src.tools.trace.traces import Recording, trace

EXAMPLE = "explain --json found.json train.py --steps 3"
# Name of the event that `jax.monitoring` reports when XLA has compiled a program, or
# when the compilation cache has returned it.
_COMPILED = "/jax/core/compile/backend_compile_duration"


class ExplainError(UbError, RuntimeError):
    """Raised if XLA has dumped no HLO text of the programs that a script compiled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    hardware = f"predict for {', '.join(HARDWARE)} (default: the local devices)"
    add("--hardware", type=command_line.name_of(HARDWARE), help=hardware)
    command_line.add_json(parser, "the table", has_program=True)
    command_line.add_module(parser)
    program = "or the name of a module, after -m; and its arguments. Options of "
    program += "explain precede it"
    # Unlike nargs="+", PARSER also takes the options and "--" that follow the script.
    add("program", nargs=argparse.PARSER, metavar="script.py", help=program)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Runs the program, prints the table and returns the program's exit status."""
    script, *arguments = command_line.split_program(given.program)
    command_line.check_program("explain", script, is_module=given.module)
    command_line.note_misplaced_options("explain", given, arguments)
    with tempfile.TemporaryDirectory() as folder:
        # The folder is set before the script runs, because XLA reads the setting when
        # the script starts the backend.
        settings.dump_compiled_programs(folder)
        has_engine = cpu_engine.why_not() is None
        with (
            recording() as lowered,
            trace() if has_engine else contextlib.nullcontext(Recording()) as traced,
            _compiled() as compiled,
            command_line.program_stdout(given),
        ):
            status = command_line.run_program(script, arguments, is_module=given.module)
        texts = [
            path.read_text()
            for path in sorted(pathlib.Path(folder).glob("*after_optimizations.txt"))
        ]
    if compiled and not texts:
        raise ExplainError(
            f"explain: XLA wrote none of the {len(compiled)} programs that "
            "the script compiled. explain asks for them with --xla_dump_to in "
            f"XLA_FLAGS, which is now {shown(settings.xla_flags())}. Add to the flags "
            f"that are set, for example {settings.ADDING_XLA_FLAGS}, leave out "
            "--xla_dump_to, and switch off the persistent compilation cache, with "
            "which XLA compiles nothing."
        )
    found = [one for text in texts for one in hlo.collectives(text)]
    waits = traced.trace.exposed_by_op_s() if traced.trace else {}
    name = pathlib.Path(script).name
    table = program.table_of(name, lowered, found, given.hardware, waits)
    if jax.process_index() == 0:  # in a job, the other processes print nothing
        command_line.say(given, str(table))
        command_line.write(given, table.as_json())
    return status


@contextlib.contextmanager
def _compiled() -> Iterator[list[str]]:
    """Yields a list that gets one entry per program that JAX compiles in the block."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
