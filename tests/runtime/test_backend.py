import jax
import pytest

from jax_ub import __main__
from jax_ub._src.runtime import backend
from jax_ub._src.tools import doctor
from jax_ub.errors import UnsupportedOverlapError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("no backend 'tpu'."), "no backend 'tpu'. Install what it needs"),
        # jax 0.10 and 0.12 raise this error with JAX_PLATFORMS=cuda and no plugin.
        (AssertionError(), "nothing is installed for it. Install what it needs"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_backend_that_cannot_start_is_reported_in_one_line(
    error, text, monkeypatch, capsys
):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UnsupportedOverlapError, match="jax does not start") as raised:
        backend.start()
    assert text in str(raised.value)
    assert __main__.main(["trace", "--op", "all_gather_matmul"]) == 2
    assert text in capsys.readouterr().err
    *_, last = doctor.examine()
    assert last.name == "devices" and last.state is doctor.State.FAULT
    assert text in last.text
