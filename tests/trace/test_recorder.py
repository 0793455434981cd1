"""Tests that the recorder traces the steps of real calls."""

import jax
import numpy as np
import pytest
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import _cpu
from jax_ub._src.tools.trace import spans
from jax_ub._src.tools.trace.spans import AROUND
from jax_ub.errors import OutputError, TraceError

NUM_RANKS = 3


def program(op, method):
    gathers = op == "all_gather_matmul"
    specs = (P("tp"), P(None, "tp")) if gathers else (P(None, "tp"), P("tp"))
    out = {"all_gather_matmul": P(None, "tp"), "matmul_reduce_scatter": P("tp")}
    run = on_ranks(
        lambda x, w: getattr(ub, op)(x, w, axis_name="tp", method=method, ub_name="t"),
        tp_mesh(NUM_RANKS),
        specs,
        out.get(op, P()),
    )
    operands = np.ones((24, 12), np.float32), np.ones((12, 18), np.float32)
    return lambda: jax.block_until_ready(run(*operands))


def traced(op, method):
    run = program(op, method)
    run()
    with ub.trace() as recording:
        run()
        run()
    return recording.trace


@pytest.mark.parametrize("method", ["ring_exchange", "pipeline", "external"])
@pytest.mark.parametrize(
    "op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_recorded_steps_are_those_of_the_schedule(op, method):
    found = traced(op, method)
    assert [call.label for call in found.calls] == [f"{op} (ub_name 't')"] * 2
    for index in range(2):
        spans = [s for s in found.of_call(index) if s.kind not in AROUND]
        num_splits = 1 + max(s.split for s in spans)
        for rank in range(NUM_RANKS):
            steps = _cpu.schedule(op, method, rank, NUM_RANKS, num_splits)
            assert [
                (s.kind, s.chunk, s.split, s.peer, s.payload)
                for s in spans
                if s.rank == rank
            ] == [(s.kind, s.chunk, s.split, s.peer, s.payload) for s in steps]


def test_a_direct_call_has_no_steps_of_chunks():
    assert {span.kind for span in traced("all_gather_matmul", "direct").spans} == {
        *("call", "gather", "unit")
    }


def test_recorded_steps_of_aggregated_chunks_are_those_of_the_schedule():
    cfgs = {"qkv_fprop": {"aggregate": True}}
    mesh = tp_mesh(4)
    ub.initialize_ub((24, 12), 4, mesh=mesh, ub_cfgs=cfgs)
    run = on_ranks(
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv"),
        mesh,
        (P("tp"), P(None, "tp")),
        P(None, "tp"),
    )
    with ub.trace() as recording:
        jax.block_until_ready(run(np.ones((24, 12)), np.ones((12, 8))))
    (call,) = recording.trace.calls
    assert call.variant == "aggregate"
    spans = [s for s in recording.trace.of_call(0) if s.kind not in AROUND]
    for rank in range(4):
        steps = _cpu.schedule(call.op, call.method, rank, 4, 1, call.variant)
        assert [(s.kind, s.chunk) for s in spans if s.rank == rank] == [
            (s.kind, s.chunk) for s in steps
        ]


def test_trace_is_written_to_the_given_path(tmp_path):
    run = program("matmul_reduce_scatter", "direct")
    with ub.trace(tmp_path / "step.json") as recording:
        run()
    assert spans.read([tmp_path / "step.json"]) == recording.trace
    assert recording.trace.seconds_of(0) > 0


def test_trace_of_a_failed_block_is_written(tmp_path):
    with pytest.raises(KeyError), ub.trace(tmp_path / "step.json"):
        program("matmul_all_reduce", "direct")()
        raise KeyError
    assert len(spans.read([tmp_path / "step.json"]).calls) == 1
    assert traced("all_gather_matmul", "direct").calls


@pytest.mark.parametrize("name", ["none/step.json", "a\0/step.json"])
def test_an_unusable_path_is_an_error_before_the_block_runs(name, tmp_path):
    unusable = pytest.raises(OutputError, match="^trace: .*(no folder|null byte)")
    with unusable as caught, ub.trace(tmp_path / name):
        pytest.fail("the block runs")
    assert caught.value.__notes__ == ["See docs/trace.md"]


def test_nested_traces_are_errors():
    text = "another trace is being recorded, by .* python -m jax_ub trace or explain"
    again = pytest.raises(TraceError, match=text)
    with ub.trace(), again, ub.trace():
        pass


def test_each_process_of_a_job_writes_its_own_file(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with ub.trace(tmp_path / "out.json"):
        pass
    assert [*tmp_path.iterdir()] == [tmp_path / "out.1.json"]
