"""Tests the dispatch of `python -m jax_ub`, and how interrupted commands exit."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from jax_ub import __main__
from jax_ub._src.output import version_of
from jax_ub._src.tools import doctor


def run_with_closed_stdout(*arguments):
    """Returns the exit status and stderr of a command whose stdout has no reader."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jax_ub", *arguments]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    return ended.returncode, ended.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("buffered", [True, False])
def test_closed_stdout_ends_a_command_without_an_error_text(buffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    ended = run_with_closed_stdout("simulate", "--tp", "1")
    assert ended == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_closed_stdout_ends_the_help_without_an_error_text(option, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    assert run_with_closed_stdout(option) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_full_disk_ends_a_command_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    script = tmp_path / "script.py"
    script.write_text("print('left in the buffer')")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "jax_ub", "trace", "--json", "/dev/null", script],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert ended.returncode == 1
    reason = b"cannot write to stdout: No space left on device\n"
    assert ended.stderr.endswith(reason)


@pytest.mark.slow
def test_broken_pipe_of_a_script_is_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise BrokenPipeError('a socket')")
    ended = subprocess.run(
        [sys.executable, "-m", "jax_ub", "trace", str(script)],
        capture_output=True,
    )
    assert ended.returncode == 1
    assert b"BrokenPipeError: a socket" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["trace", "explain"])
def test_an_error_of_jax_ub_in_a_script_has_a_traceback(command, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import jax_ub\njax_ub.get_ub('qkv_fprop')")
    ended = subprocess.run(
        [sys.executable, "-m", "jax_ub", command, str(script)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert f'File "{script}", line 2, in <module>' in ended.stderr
    assert "LifecycleError: get_ub" in ended.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(given):
        raise KeyboardInterrupt  # no signal: a shell's background jobs ignore it

    monkeypatch.setattr(doctor, "command", interrupted)
    assert __main__.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_only_the_selected_command_is_imported():
    program = (
        "import sys, contextlib; from jax_ub import __main__\n"
        "with contextlib.suppress(SystemExit): __main__.main(['launch'])\n"
        "names = {m.split('.')[3] for m in sys.modules if 'jax_ub._src.tools.' in m}\n"
        "print(names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "'launch'" in done.stdout
    assert not any(f"'{name}'" in done.stdout for name in ("bench", "trace", "tune"))
    assert "the following arguments are required: script.py" in done.stderr


@pytest.mark.slow
def test_the_launcher_starts_without_jax():
    program = [sys.executable, "-X", "importtime", "-m", "jax_ub", "launch", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "jax_ub._src.tools.launch.job" in imported
    assert "jax" not in imported


@pytest.mark.parametrize("name", __main__._COMMANDS)
def test_the_help_of_a_command_has_one_example(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main([name, "--help"])
    text = capsys.readouterr().out
    assert text.count(f"  python -m jax_ub {name} ") == 1


def test_the_guide_shows_the_help_with_every_command_and_exit_status(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"{name}  " in text for name in __main__._COMMANDS)
    guide = pathlib.Path(__file__).parents[1] / "docs/commands.md"
    shown = text[text.index("exit status:") : text.index("docs/commands.md")]
    assert shown.strip() in guide.read_text()


def test_an_unknown_command_is_rejected_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["doctr", "--json"])
    text = "error: there is no command 'doctr'. Did you mean 'doctor'? Known: "
    assert text in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--version"])
    assert capsys.readouterr().out == (
        f"jax_ub {version_of('jax_ub')}, jax {jax.__version__}\n"
    )
