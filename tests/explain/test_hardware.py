"""Tests the hardware for which `ub.explain` predicts times."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from overlapped_mlp import mlp, operands

import jax_ub as ub
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.tools.explain import report


def test_unknown_hardware_is_an_error_without_calls_too():
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'h100'"):
        ub.explain(jnp.sin, jnp.ones(2), hardware="h1000")


def test_times_are_predicted_for_the_given_hardware():
    slow, fast = (
        ub.explain(mlp(), *operands(), hardware=name).rows[0].predicted_s
        for name in ("a100", "b200")
    )
    assert slow > fast
    assert report.find_hardware(None).name == "cpu"


def test_calls_that_auto_leaves_to_xla_on_a_gpu_are_predicted_so():
    auto, xla = (
        ub.explain(mlp(method), *operands(), hardware="h100").rows
        for method in ("auto", "xla")
    )
    assert [row.method for row in auto] == ["direct", "direct"]
    assert auto[0].predicted_s == xla[0].predicted_s
    assert auto[1].predicted_s < xla[1].predicted_s


def test_hardware_may_be_a_dict_of_rates():
    def seconds(hardware):
        return ub.explain(mlp(), *operands(), hardware=hardware).rows[0].predicted_s

    assert seconds({"name": "h100"}) == seconds("h100")
    assert seconds({"name": "h100", "wire_bytes_per_s": 1e6}) > seconds("h100")
    h200 = machines.HARDWARE["h200"]
    names = ("flops_per_s", "wire_bytes_per_s", "memory_bytes_per_s", "processors")
    assert seconds({name: getattr(h200, name) for name in names}) == seconds("h200")
    numpy_rates = {"wire_bytes_per_s": np.float32(2**39), "processors": np.int64(132)}
    assert isinstance(seconds({"name": "h100", **numpy_rates}), float)


@pytest.mark.parametrize(
    ("hardware", "text"),
    [
        ({"flop_per_s": 1.0}, "has the key 'flop_per_s', .* Did you mean 'flops_per_s"),
        ({"flops_per_s": 1e12}, "lacks wire_bytes_per_s, memory_bytes_per_s, process"),
        ({"name": "h100", "flops_per_s": 0}, "flops_per_s = 0, which is not a positiv"),
        ({"name": "h100", "launch_s": -1.0}, "launch_s = -1.0, which is not a time"),
        ({"name": "h100", "launch_s": "1"}, "launch_s = '1', which is not a time"),
        ({"name": "h100", "processors": 1.5}, "processors = 1.5, which is not an int"),
        ({"name": "h100", "processors": 4}, "reserved_processors = 4 of them run no"),
        ({"name": "h100", "launch_s": 10**400}, "launch_s = 1.*, which is not a time"),
        ({"name": ["h100"]}, r"name = \['h100'\], which is not a string"),
    ],
)
def test_invalid_rates_are_errors(hardware, text):
    with pytest.raises(ub.errors.UbError, match=text):
        ub.explain(jnp.sin, jnp.ones(2), hardware=hardware)


def test_unknown_device_is_noted_with_the_assumed_machine(monkeypatch):
    monkeypatch.setattr(report, "_local_machine", lambda: None)
    (note,) = ub.explain(mlp(), *operands()).notes[-1:]
    assert note.startswith("unknown device 'cpu': times are predicted for h200")
    for table in (
        ub.explain(mlp(), *operands(), hardware="h100"),
        ub.explain(jnp.sin, jnp.ones(2)),  # without times
    ):
        assert not any("unknown device" in note for note in table.notes)


def test_times_of_another_machine_are_labeled():
    head = str(ub.explain(mlp(), *operands(), hardware="h100")).splitlines()[1]
    assert "predicted h100" in head
    for hardware in ("cpu", None):
        found = ub.explain(mlp(), *operands(), hardware=hardware)
        assert found.hardware == ""
        assert re.search("predicted$", str(found).splitlines()[1])
