"""Tests what all commands share: `--json`, colors and progress."""

import argparse
import io
import json
import sys

import pytest

from jax_ub import __main__
from jax_ub._src.tools import console, doctor
from jax_ub._src.tools.doctor import Finding, State


class Terminal(io.StringIO):
    def isatty(self):
        return True


def parse(*arguments):
    parser = argparse.ArgumentParser()
    console.add_json(parser, "all")
    return parser.parse_args(arguments)


def test_text_is_printed_and_the_document_written(tmp_path, capsys):
    given = parse("--json", str(tmp_path / "found.json"))
    console.say(given, "a table")
    console.write(given, {"a": 1}, is_complete=False)
    assert json.loads((tmp_path / "found.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize("option", [["--json"], ["--json", "-"], ["--json=-"]])
def test_only_the_complete_document_is_printed(option, capsys):
    given = parse(*option)
    console.say(given, "a table")
    console.write(given, {"a": 0}, is_complete=False)
    with console.program_stdout(given):
        sys.stdout.write("of a program\n")
    console.write(given, {"a": 1})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1}
    assert printed.err == "of a program\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--json"],
        ["simulate", "--json"],
        ["trace", "--json", "-", "--op", "all_gather_matmul", "--repeats", "1"],
        ["explain", "--json", "-"],
        ["tune", "--json", "--shapes", "32x48x80", "--rounds", "1", "--output"],
        ["bench", "--json", "--quick", "--ops", "gemm", "--rounds", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_stdout_has_nothing_but_json(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("print('of a program')")
    needs = {"explain": [str(script)], "tune": [str(tmp_path / "tuned.json")]}
    assert __main__.main([*arguments, *needs.get(arguments[0], [])]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("stdout", "environment", "is_colored"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_a_terminal_gets_colors_unless_the_user_wants_none(
    stdout, environment, is_colored, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout())
    findings = [Finding("a", State.OK, "b"), Finding("c", State.FAULT, "d")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert __main__.main(["doctor"]) == 1
    plain = "   ok  a  b\nFAULT  c  d\n"
    colored = "   \033[32mok\033[0m  a  b\n\033[31mFAULT\033[0m  c  d\n"
    assert sys.stdout.getvalue() == (colored if is_colored else plain)


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_progress_is_shown_on_a_terminal_only(stderr, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr())
    assert list(console.progress("tune", "ab")) == ["a", "b"]
    shown = [f"\r\033[K{text}\r" for text in ("tune: 1 of 2", "tune: 2 of 2", "")]
    assert sys.stderr.getvalue() == ("".join(shown) if stderr is Terminal else "")
