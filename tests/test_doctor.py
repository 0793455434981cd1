import json

import pytest

from jax_ub import doctor
from jax_ub.__main__ import main
from jax_ub.doctor import State
from jax_ub.methods import Method
from jax_ub.runtime import engine


def findings():
    return {finding.name: finding for finding in doctor.examine()}


def test_a_healthy_installation_has_no_fault(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert "FAULT" not in report
    assert 'method "direct"' in report


def test_every_method_is_tried():
    found = findings()
    for method in Method:
        assert found[f'method "{method.value}"'].text == "runs on 2 devices"


def test_the_report_is_json_where_asked_for(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name", "state", "text"} == set(found[0])
    assert {"python", "jax", "XLA FFI API", "devices"} <= {f["name"] for f in found}


def test_a_missing_engine_is_a_fault(monkeypatch, capsys):
    def missing():
        raise ImportError("jax_ub: its compiled engine jax_ub._cpu is missing.")

    monkeypatch.setattr(engine, "load", missing)
    assert main(["doctor"]) == 1
    assert "jax_ub._cpu is missing" in capsys.readouterr().out


def test_too_few_threads_of_jaxlib_are_a_warning(monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    finding = findings()["jaxlib threads"]
    assert finding.state is State.WARNING
    assert "Set NPROC=64 before jax starts" in finding.text


@pytest.mark.parametrize("name", ["JAX_UB_TIMEOUT_S", "JAX_UB_NUM_THREADS", "NPROC"])
def test_a_setting_that_is_no_number_is_a_fault(name, monkeypatch):
    monkeypatch.setenv(name, "many")
    finding = findings()["environment"]
    assert finding.state is State.FAULT
    assert f"{name} = 'many' is not a positive number" in finding.text


def test_more_computing_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("NPROC", "64")
    finding = findings()["engine threads"]
    if engine.load().num_threads() == 1:
        pytest.skip("the engine computes with one thread on this machine")
    assert finding.state is State.WARNING
    assert "Set JAX_UB_NUM_THREADS=1" in finding.text


def test_wrong_numbers_are_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "_column_linear", lambda mesh, method: lambda x, w: x)
    finding = findings()['method "direct"']
    assert finding.state is State.FAULT
    assert finding.text == "runs, but its numbers are wrong"
