import pytest

from jax_ub.runtime import settings


def test_nothing_is_set_by_default(monkeypatch):
    for name in ("METHOD", "TIMEOUT_S", "NUM_THREADS", "ISA"):
        monkeypatch.delenv(f"JAX_UB_{name}", raising=False)
    assert settings.method() is None
    assert settings.timeout_s() is None
    assert settings.num_threads() is None
    assert settings.isa() is None


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
def test_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", text)
    message = f"JAX_UB_TIMEOUT_S = '{text}' is not a positive number of seconds"
    with pytest.raises(ValueError, match=message):
        settings.timeout_s()


def test_number_of_threads_is_whole(monkeypatch):
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "1.5")
    with pytest.raises(
        ValueError, match="JAX_UB_NUM_THREADS = '1.5' is not a positive"
    ):
        settings.num_threads()
