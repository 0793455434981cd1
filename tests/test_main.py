"""How a command ends that is interrupted, or that nobody reads any more."""

import os
import signal
import subprocess
import sys

import pytest

from jax_ub import __main__
from jax_ub._src.tools.doctor import command

_SAY = "import jax_ub.__main__ as main, sys; sys.exit(main.main(sys.argv[1:]))"


def main_into_a_closed_pipe(*arguments):
    """The exit status and stderr of a command whose reader is gone."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", _SAY, *arguments]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_is_gone_ends_a_command_quietly(buffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    ended = main_into_a_closed_pipe("simulate", "--tp", "1")
    assert ended == (128 + signal.SIGPIPE, "")


def test_a_full_disk_ends_a_command_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    script = tmp_path / "script.py"
    script.write_text("print('left in the buffer')")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", _SAY, "trace", "--json", "/dev/null", str(script)],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert ended.returncode == 1
    reason = b"cannot write to stdout: No space left on device\n"
    assert ended.stderr.endswith(reason)


def test_a_broken_pipe_of_a_script_is_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise BrokenPipeError('a socket of its own')")
    ended = subprocess.run(
        [sys.executable, "-c", _SAY, "trace", str(script)],
        capture_output=True,
    )
    assert ended.returncode == 1
    assert b"BrokenPipeError: a socket of its own" in ended.stderr


def test_ctrl_c_ends_a_command_quietly(monkeypatch, capsys):
    def interrupted(given):
        raise KeyboardInterrupt  # no signal: a shell's background jobs ignore it

    monkeypatch.setattr(command, "command", interrupted)
    assert __main__.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""
