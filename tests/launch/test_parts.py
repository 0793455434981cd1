"""Tests commands that run themselves in several processes."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile

import pytest

from jax_ub._src.tools.launch import job
from jax_ub._src.tools.launch.job import python
from jax_ub._src.tools.launch.parts import JobError, exit_on_failure, parts_of
from jax_ub.errors import UbError


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Replaces the Python interpreter by a shell script."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    return replace


def run(num_processes=2, devices_per_process=1, **options):
    sizes = {"num_processes": num_processes, "devices_per_process": devices_per_process}
    with parts_of("doctor", ["a word"], **sizes, **options):
        pass


@pytest.mark.parametrize("stdout", [None, 2])
def test_output_of_the_parts_is_that_of_the_command(interpreter, stdout, capfd):
    interpreter('echo "$@"; exit 3')  # in place of the supervisor
    text = "3 processes failed with exit status 3"
    with pytest.raises(JobError, match=f"^doctor: {text}; their") as caught:
        run(num_processes=3, stdout=stdout)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status) == (str(caught.value), 3)
    texts = capfd.readouterr()
    assert texts[0 if stdout else 1] == ""
    assert texts[1 if stdout else 0].endswith("/supervisor.py\n")


def test_job_runs_the_parts(monkeypatch):
    started = []
    monkeypatch.setattr(job, "_supervise", lambda *given: started.append(given) or 0)
    run(num_processes=3, devices_per_process=2, stdout=2)
    ((given, stdout),) = started
    path = f"{given['folder']}/part.json"
    words = ["-m", "jax_ub", "doctor", "--part", path, "a word"]
    assert (given["command"], stdout) == ([*python(), *words], 2)
    devices = [each["JAX_LOCAL_DEVICE_IDS"] for each in given["environments"]]
    assert devices == ["0,1", "2,3", "4,5"]
    assert not os.path.exists(given["folder"])


def test_sigterm_removes_the_folder_of_the_parts(interpreter, tmp_path, monkeypatch):
    python = interpreter("kill -TERM $PPID; exec sleep 60")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ended_by_sigterm():
        run()
    assert [*tmp_path.iterdir()] == [python]


def test_sigterm_during_the_start_ends_the_supervisor(interpreter, monkeypatch):
    interpreter("exec sleep 60")
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with ended_by_sigterm():
        run()
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_folder_is_removed_if_a_signal_comes_while_its_files_are_read(
    number, interpreter, tmp_path, monkeypatch
):
    python = interpreter("exit 0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def callers(*_):
        pass

    before = signal.signal(number, callers)
    sizes = {"num_processes": 2, "devices_per_process": 1}
    try:
        ends = pytest.raises(SystemExit, match=str(128 + number))
        with ends, parts_of("doctor", [], **sizes) as paths:
            assert paths[0].parent.is_dir()
            signal.raise_signal(number)
        assert signal.getsignal(number) is callers
    finally:
        signal.signal(number, before)
    assert [*tmp_path.iterdir()] == [python]


@pytest.mark.slow
def test_sigkill_of_the_command_ends_its_processes_and_removes_the_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(60)")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "jax_ub", "trace", "--processes", "2", str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        assert [*temporary.iterdir()]
        process.kill()
        process.stdout.read()  # until all processes that could write have ended
    assert not [*temporary.iterdir()]


@contextlib.contextmanager
def ended_by_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        yield
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("error", "num_lines"), [(UbError("a reason"), 1), (ValueError("a bug"), 6)]
)
def test_an_error_in_a_process_is_one_line_unless_it_is_a_bug(
    error, num_lines, monkeypatch, capsys
):
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(status))
    with pytest.raises(SystemExit, match="1"), exit_on_failure():
        raise error
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= num_lines
    assert lines[-1].endswith(str(error))
