import os
import pathlib
import re

import pytest

from jax_ub import _cpu
from jax_ub._src.runtime import settings
from jax_ub.errors import ConfigurationError


def test_no_variable_is_set_by_default(monkeypatch):
    for name in ("METHOD", "TIMEOUT_S", "NUM_THREADS", "ISA"):
        monkeypatch.delenv(f"JAX_UB_{name}", raising=False)
    assert settings.method() is None
    assert settings.timeout_s() == 120 == _cpu.default_timeout_s
    assert settings.num_threads() is None
    assert settings.isa() is None


def test_every_variable_that_is_read_is_listed():
    text = pathlib.Path(settings.__file__).read_text()
    assert {f"JAX_UB_{word}" for word in re.findall('"JAX_UB_([A-Z0-9_]+)"', text)} == {
        *settings.NAMES
    }


def test_values_are_read(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", "1.5")
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "3")
    monkeypatch.setenv("JAX_UB_ISA", "portable")
    assert settings.method() == "xla"
    assert settings.timeout_s() == 1.5
    assert settings.num_threads() == 3
    assert settings.isa() == "portable"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_invalid_timeout_is_rejected(monkeypatch, text):
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", text)
    message = f"JAX_UB_TIMEOUT_S = '{text}' is not a positive number of seconds"
    with pytest.raises(ConfigurationError, match=message):
        settings.timeout_s()


@pytest.mark.parametrize("text", ["inf", "1e10", "1e300"])
def test_an_excessive_timeout_is_clamped(monkeypatch, text):
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", text)
    assert settings.timeout_s() == 1e9


def test_the_number_of_threads_is_an_integer(monkeypatch):
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "1.5")
    with pytest.raises(
        ValueError, match="JAX_UB_NUM_THREADS = '1.5' is not a positive"
    ):
        settings.num_threads()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("JAX_UB_ALLOW_TF32", settings.allow_tf32),
        ("JAX_UB_NVLS", settings.nvls),
    ],
)
def test_a_switch_is_0_or_1(monkeypatch, name, read):
    monkeypatch.delenv(name, raising=False)
    assert not read()
    monkeypatch.setenv(name, "1")
    assert read()
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} = 'yes' is not 0 or 1"):
        read()


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, 0.75),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, 0.4),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 0),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, 0.75),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "nan"}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": "-1"}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": "1.5"}, 1),
    ],
)
def test_xlas_share_of_gpu_memory_follows_its_variables(monkeypatch, variables, share):
    for name in ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings.xla_memory_share() == share


@pytest.mark.parametrize(("cores", "threads"), [(2, 32), (64, 64), (None, 32)])
def test_pool_threads_are_enough_for_the_devices_and_the_cores(
    cores, threads, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "environ", {})
    settings.set_pool_threads(8)
    assert settings.pool_threads() == threads
    settings.set_pool_threads(100)  # keeps what is set
    assert settings.pool_threads() == threads
