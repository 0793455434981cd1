"""Commands that start themselves in several processes."""

import sys

import pytest

from jax_ub.launch.parts import run_parts


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize("prints_aside", [False, True])
def test_the_launcher_is_asked_for_processes_of_the_command(
    interpreter, prints_aside, capfd
):
    status = run_parts(
        ["doctor", "--part", "a file"],
        num_processes=3,
        devices_per_process=2,
        prints_aside=prints_aside,
    )
    assert status == 3
    launch = "-m jax_ub launch -n 3 --devices-per-process 2 "
    printed = launch + "-m jax_ub doctor --part a file\n"
    assert capfd.readouterr() == (("", printed) if prints_aside else (printed, ""))
