"""The pure-Python wheel: calls run as plain `jax.lax`, and say why."""

import importlib.metadata
import importlib.util
import types

import jax
import numpy as np
import pytest
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub.__main__ import main
from jax_ub._src.runtime import (
    communicators,
    connection_attempt,
    cpu_engine,
    hosts,
    tuned_file,
)
from jax_ub._src.runtime.communicators import DeviceGroups

REASON = "the pure-Python wheel has no engine"


@pytest.fixture
def no_engine(monkeypatch):
    def fail():
        raise cpu_engine.NoEngineError(f"jax_ub: {REASON}")

    monkeypatch.setattr(cpu_engine, "why_not", lambda: REASON)
    monkeypatch.setattr(cpu_engine, "load", fail)
    ub.fallbacks(clear=True)


def layer(method=None):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", method=method)

    return on_ranks(function, tp_mesh(2), (P("tp"), P(None, "tp")), P(None, "tp"))


def operands():
    return np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)


def installed(purelib):
    return lambda name: types.SimpleNamespace(
        read_text=lambda file: f"Root-Is-Purelib: {purelib}\nTag: py3-none-any\n"
    )


@pytest.mark.parametrize(
    ("purelib", "module", "has_engine"),
    [("true", None, False), ("true", "found", True), ("false", None, True)],
)
def test_the_wheel_and_its_files_tell_whether_there_is_an_engine(
    monkeypatch, purelib, module, has_engine
):
    monkeypatch.delitem(cpu_engine.sys.modules, "jax_ub._cpu", raising=False)
    monkeypatch.setattr(importlib.metadata, "distribution", installed(purelib))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    reason = cpu_engine.why_not.__wrapped__()
    assert (reason is None) == has_engine
    assert has_engine or reason.startswith(REASON)


def test_a_source_tree_should_have_an_engine(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert cpu_engine.why_not.__wrapped__() is None


def test_calls_run_as_plain_jax_and_record_why(no_engine):
    x, w = operands()
    function = layer()
    np.testing.assert_array_equal(function(x, w), x @ w)
    assert [one.reason for one in ub.fallbacks()] == [REASON]
    gradient = jax.jit(jax.grad(lambda w: function(x, w).sum()))(w)
    np.testing.assert_array_equal(gradient, np.full_like(w, len(x)))
    (row,) = ub.explain(function, x, w).rows
    assert (row.op, row.overlapped, row.reason) == ("all_gather_matmul", False, REASON)


def test_a_named_method_is_rejected_with_the_reason(no_engine):
    x, w = operands()
    with pytest.raises(
        ub.errors.UnsupportedOverlapError,
        match=f'"direct" cannot run: {REASON}. Pass method="auto"',
    ):
        layer("direct")(x, w)
    np.testing.assert_array_equal(layer("xla")(x, w), x @ w)


def test_named_overlaps_are_initialized(no_engine):
    ub.initialize_ub((4, 8), 2, mesh=tp_mesh(2))
    assert "without an engine" in tuned_file.environment.__wrapped__().device
    assert ub.get_ub("qkv_fprop").method == "ring_exchange"
    assert ub.memory_report().held_bytes == 0
    assert f"buffers: none: {REASON}" in str(ub.memory_report())
    ub.destroy_ub()


def test_processes_agree_that_there_is_no_engine(no_engine, monkeypatch):
    class BothAlike:
        """A fake all-gather whose process 1 sends the values of process 0."""

        def gather(self, value, error=None, *, timeout_s=None):
            return {0: value, 1: value}

    monkeypatch.setenv("JAX_UB_ISA", "portable")
    groups = DeviceGroups(((0, 1),), {0: 0, 1: 1}, 0, "cpu", 8, 8, "test")
    connection_attempt.connect(groups, BothAlike(), {})
    (connection,) = communicators.connections()
    communicators.disconnect_all_but(())
    assert connection.reason == REASON


def test_programs_with_calls_of_the_engine_cannot_be_loaded(no_engine):
    with pytest.raises(ImportError, match=REASON):
        cpu_engine.register_targets.__wrapped__()


def test_doctor_warns_and_finds_no_fault(no_engine, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"  engine                  calls run plain jax.lax: {REASON}" in printed
    assert "warning  engine  " in printed
    assert 'ok  method "xla"' in printed


def test_commands_that_need_an_engine_say_so(no_engine, capsys):
    assert main(["trace", "--op", "all_gather_matmul", "--tp", "2"]) == 2
    assert f"error: jax_ub: {REASON}" in capsys.readouterr().err


def test_launch_needs_linux(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["launch", "-n", "2", __file__]) == 2
    assert "launch: it needs Linux, and this is darwin" in capsys.readouterr().err


def test_cores_are_counted_where_affinity_does_not_exist(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert hosts.cores() == [0, 1, 2]
