"""Signals that nohup or a shell has made ignored end no process of a job."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import jax_ub

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(jax_ub.__file__).parents[1]
# Waits until the file of its argument exists. The ranks of a job have no common stdin
# to wait for, so the script looks for the file.
WAITING = """
import pathlib, sys, time
print("waits", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("ends")
"""


@pytest.mark.parametrize("name", ["HUP", "INT"])
def test_job_outlives_an_ignored_signal(tmp_path, name):
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.write_text(WAITING)
    ignoring = ["sh", "-c", f'trap "" {name}; exec "$@"', "sh", sys.executable]
    with subprocess.Popen(
        [*ignoring, "-m", "jax_ub", "launch", "-n", "2", str(script), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        begin = [process.stdout.readline() for _ in range(2)]
        process.send_signal(getattr(signal, f"SIG{name}"))
        file.touch()
        out, err = process.communicate(timeout=300)
    assert sorted(begin) == ["[0] waits\n", "[1] waits\n"]
    assert (process.returncode, sorted(out.splitlines()), err) == (
        0,
        ["[0] ends", "[1] ends"],
        "",
    )
