"""Adds the examples' folder to the path, and runs train_lm.py in this process."""

import importlib
import pathlib
import sys

import jax
import pytest

import jax_ub as ub

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))


@pytest.fixture
def run_train_lm(monkeypatch, capsys):
    """Returns a function that runs train_lm.py with flags, and returns its output."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(len(jax.devices())))

    def run(flags):
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *flags])
        importlib.import_module("train_lm").main()
        ub.destroy_ub()
        return capsys.readouterr().out

    return run
