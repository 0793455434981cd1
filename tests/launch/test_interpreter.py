"""Options of Python itself, such as `-O`, apply to all processes of a job."""

import os
import pathlib
import subprocess
import sys

import pytest

import jax_ub
from jax_ub._src.tools.launch import job, parts

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(jax_ub.__file__).parents[1]


def launch(options, path, text):
    path.write_text(text)
    launcher = ["-m", "jax_ub", "launch", "-n", "2", str(path)]
    return subprocess.run(
        [sys.executable, *options, *launcher],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_programs_run_with_the_options_of_the_launcher(tmp_path):
    text = "import sys; print(sys.flags.optimize, sys.warnoptions[-1])"
    done = launch(["-O", "-W", "error::UserWarning"], tmp_path / "script.py", text)
    assert done.returncode == 0, done.stderr
    lines = [f"[{process}] 1 error::UserWarning" for process in range(2)]
    assert sorted(done.stdout.splitlines()) == lines


@pytest.mark.parametrize(
    "options",
    [
        ("-IBOObq", "-Xint_max_str_digits=5000", "-Xno_debug_ranges"),
        ("-EsPd", "-Xdev", "-Xutf8", "-Wignore", "-We:some text:UserWarning"),
    ],
    ids=["isolated", "dev"],
)
def test_all_options_of_python_are_passed_on(options):
    facts = "print(sys.flags, sys._xoptions, list(dict.fromkeys(sys.warnoptions)))"
    text = (
        f"import sys; {facts}; sys.path.insert(0, {str(ROOT)!r}); "
        "from jax_ub._src.tools.launch import job; print(*job.python(), sep='\\n')"
    )
    first, *python = output_of([sys.executable, *options, "-c", text])
    assert [first] == output_of([*python, "-c", f"import sys; {facts}"])


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_launcher_leaves_no_file_open(tmp_path):
    done = launch(["-X", "dev"], tmp_path / "script.py", "pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_commands_pass_the_options_to_their_processes(monkeypatch):
    started = []
    monkeypatch.setattr(job, "_supervise", lambda given, _: started.append(given) or 0)
    monkeypatch.setattr(sys, "warnoptions", ["error::UserWarning"])
    with parts.parts_of("doctor", [], num_processes=2, devices_per_process=1):
        pass
    options, module, _ = " ".join(started[0]["command"]).partition("-m jax_ub doctor")
    assert module
    assert "-Werror::UserWarning" in options
