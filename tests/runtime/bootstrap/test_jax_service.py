"""The store of notes that jax.distributed keeps."""

import jax
import pytest

from jax_ub._src.runtime.bootstrap import jax_service
from jax_ub._src.runtime.bootstrap.jax_service import JaxService
from jax_ub.errors import CommunicatorError


class Deserted:
    """A client whose coordinator is gone."""

    def key_value_set(self, key, text, allow_overwrite=False):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def key_value_try_get(self, key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def key_value_delete(self, key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")


class Empty(Deserted):
    """A client whose coordinator has no notes."""

    def key_value_try_get(self, key):
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")


def test_a_coordinator_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(jax_service.distributed.global_state, "client", Deserted())
    service = JaxService("tp")
    gone = "coordinator of jax.distributed.* does not answer: UNAVAILABLE"
    with pytest.raises(CommunicatorError, match=gone):
        service.write("key", "text")
    with pytest.raises(CommunicatorError, match=gone):
        service.read("key")
    service.erase("key")  # nothing is left to erase


def test_the_first_process_that_asks_names_the_job(monkeypatch):
    notes = {}

    class Service:
        def key_value_set(self, key, text, allow_overwrite=False):
            if key in notes and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: key")
            notes[key] = text

        key_value_try_get = notes.get

    for number in range(2):
        notes.clear()
        monkeypatch.setattr(jax_service.distributed.global_state, "client", Service())
        names = {jax_service.job() for _ in range(3)}
        assert names == set(notes.values()), number


def test_a_job_has_no_name_where_its_coordinator_is_gone(monkeypatch):
    monkeypatch.setattr(jax_service.distributed.global_state, "client", Deserted())
    with pytest.raises(CommunicatorError, match="see why it ended"):
        jax_service.job()
    monkeypatch.setattr(jax_service.distributed.global_state, "client", None)
    assert jax_service.job() == "no job"


def test_a_note_that_nobody_left_is_none(monkeypatch):
    monkeypatch.setattr(jax_service.distributed.global_state, "client", Empty())
    assert JaxService("tp").read("key") is None


def test_without_a_job_there_is_no_board(monkeypatch):
    monkeypatch.setattr(jax_service.distributed.global_state, "client", None)
    with pytest.raises(CommunicatorError, match=r"Call jax\.distributed\.initialize"):
        JaxService("tp")
