"""Tests traces: recorded steps of real calls, merging, waiting times, and files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import _cpu
from jax_ub._src.tools.trace import traces
from jax_ub._src.tools.trace.traces import AROUND, Call, Span, Trace
from jax_ub.errors import OutputError, TraceError, UnknownNameError

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


def traced_linear(parallel, **options):
    """Returns the recorded calls of a linear layer of bf16 arrays on two ranks."""
    ranks, features = P("tp"), P(None, "tp")
    specs, out = {
        "column": ((ranks, features), features),
        "row": ((features, ranks), ranks),
    }[parallel]
    layer = on_ranks(
        lambda x, w: ub.linear(x, w, parallel=parallel, axis_name="tp", **options),
        tp_mesh(2),
        specs,
        out,
    )
    x, w = (np.ones((32, 32), jnp.bfloat16) for _ in range(2))
    with ub.trace() as recording:
        jax.block_until_ready(layer(x, w))
    return {call.op: call for call in recording.trace.calls}


@pytest.mark.parametrize("method", ["direct", "ring_exchange"])
def test_gathered_fp8_operands_have_one_byte_per_element(method):
    recipe = ub.fp8.Float8CurrentScaling()
    for fp8, dtype in ((None, "bf16"), (recipe, "e4m3")):
        calls = traced_linear("column", fp8=fp8, method=method)
        assert calls["all_gather_matmul"].operands.startswith(f"{dtype}[16, 32]")


@pytest.mark.parametrize("fp8_buf", [False, True])
def test_fp8_buf_moves_partial_sums_out_of_the_calls_of_the_engine(fp8_buf):
    """XLA exchanges sums that are sent as FP8, so that the trace has a local GEMM."""
    cfgs = {"proj_fprop": {"fp8_buf": fp8_buf}}
    ub.initialize_ub((32, 32), 2, use_fp8=True, ub_cfgs=cfgs, mesh=tp_mesh(2))
    recipe = ub.fp8.Float8CurrentScaling()
    calls = traced_linear("row", fp8=recipe, ub_name="proj")
    assert ("matmul" in calls) == fp8_buf
    assert ("matmul_reduce_scatter" in calls) != fp8_buf


def test_trace_is_written_to_the_given_path(tmp_path):
    run = program("matmul_reduce_scatter", "direct")
    with ub.trace(tmp_path / "step.json") as recording:
        run()
    assert traces.read([tmp_path / "step.json"]) == recording.trace
    assert recording.trace.seconds_of(0) > 0


def test_block_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ub.trace("found.json"):
        monkeypatch.chdir("/")
    assert traces.read([tmp_path / "found.json"]).calls == ()


def test_trace_of_a_failed_block_is_written(tmp_path):
    with pytest.raises(KeyError), ub.trace(tmp_path / "step.json"):
        program("matmul_all_reduce", "direct")()
        raise KeyError
    assert len(traces.read([tmp_path / "step.json"]).calls) == 1
    assert traced("all_gather_matmul", "direct").calls


@pytest.mark.parametrize("name", ["none/step.json", "a\0/step.json"])
def test_an_unusable_path_is_an_error_before_the_block_runs(name, tmp_path):
    unusable = pytest.raises(OutputError, match="^trace: .*(no folder|null byte)")
    with unusable as caught, ub.trace(tmp_path / name):
        pytest.fail("the block runs")
    assert caught.value.__notes__ == ["See docs/trace.md in the repository of jax_ub"]


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


CALL = Call("op 'a'", "all_gather_matmul", "ring_exchange", 2, 0, (4, 5), "f32[8, 8]")
OTHER = dataclasses.replace(CALL, label="op 'b'")
SPAN = Span(1000, 2000, 0, 0, 0, "multiply", 0, 0, 0, -1, "operand")


def span(kind, rank, begin_us, end_us, **what):
    begin_ns, end_ns = int(1000 * begin_us), int(1000 * end_us)
    return dataclasses.replace(
        SPAN, kind=kind, rank=rank, begin_ns=begin_ns, end_ns=end_ns, **what
    )


# Each rank puts its chunk in 1 us and multiplies two chunks in 4 us each. Rank 1 waits
# longer than rank 0.
RING = (
    span("gather", 0, 0, 1, chunk=-1),
    span("gather", 1, 1, 1, chunk=-1, process=1),
    span("put", 0, 1, 2, peer=1),
    span("multiply", 0, 2, 6),
    span("wait", 0, 6, 7, chunk=1, peer=1),
    span("multiply", 0, 7, 11, chunk=1),
    span("put", 1, 5, 6, chunk=1, peer=0, process=1),
    span("multiply", 1, 6, 10, chunk=1, process=1),
    span("wait", 1, 10, 12, peer=0, process=1),
    span("multiply", 1, 12, 16, process=1),
    span("unit", 1, 12, 15, process=1, thread=3),
    span("call", 0, 0, 11, chunk=-1),
    span("call", 1, 1, 16, chunk=-1, process=1),
)


def parts():
    return [
        Trace((CALL,), tuple(s for s in RING if s.process == process), process)
        for process in (0, 1)
    ]


@pytest.mark.parametrize(
    ("label", "where", "title"),
    [
        ("column (ub_name 'up')", "up", "wgrad (up)"),
        ("column (layer 'up')", "up", "wgrad (up)"),
        ("column (ub_name 'u...)", "'u...", "wgrad ('u...)"),
        ("column", "column", "wgrad (column)"),
        ("wgrad", "wgrad", "wgrad"),
    ],
)
def test_title_of_a_call_has_its_op_and_the_layer(label, where, title):
    call = dataclasses.replace(CALL, label=label, op="wgrad")
    assert (call.where, call.title) == (where, title)


def test_equal_calls_of_all_processes_are_merged():
    found = traces.merge(parts())
    assert found.calls == (CALL,)
    assert sorted(found.spans, key=repr) == sorted(RING, key=repr)
    assert found.num_dropped == 1
    assert found.seconds_of(0) == pytest.approx(16e-6)


def test_repeated_calls_are_merged_in_order():
    one = Trace((CALL, OTHER, CALL), (dataclasses.replace(SPAN, call=2),))
    two = Trace((OTHER, CALL, CALL), (dataclasses.replace(SPAN, call=2, process=1),))
    found = traces.merge([one, two])
    assert found.calls == (CALL, OTHER, CALL)
    assert {span.call for span in found.spans} == {2}


def test_waits_are_averaged_over_ranks():
    # Rank 0 waits 1 + 1 us, rank 1 waits 2 us.
    assert traces.merge(parts()).waiting_s() == [pytest.approx(2e-6)]
    assert [one.waiting_s() for one in parts()] == [[pytest.approx(2e-6)]] * 2
    both = (*RING, span("barrier", -1, 20, 22), span("barrier", -1, 20, 26, process=1))
    key = CALL.label, CALL.op
    trace = Trace((CALL, CALL, OTHER), both)
    assert trace.waiting_s() == [pytest.approx(6e-6), 0, 0]
    assert trace.exposed_by_op_s() == {
        key: 0.0,  # the first call is left out
        (OTHER.label, OTHER.op): 0.0,
    }
    assert Trace((CALL,), both).exposed_by_op_s() == {key: pytest.approx(6e-6)}
    assert Trace((CALL,), ()).seconds_of(0) == 0.0


def test_the_spans_of_a_call_are_found_without_reading_all_spans():
    class Counted(tuple):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    spans_of_calls = [dataclasses.replace(SPAN, call=index) for index in range(9)]
    trace = Trace((CALL,) * 9, Counted(spans_of_calls))
    assert [trace.of_call(index) for index in range(9)] == [[s] for s in spans_of_calls]
    assert Counted.reads == 1


def test_trace_is_equal_after_writing_and_reading(tmp_path):
    files = []
    for number, part in enumerate(parts()):
        files.append(tmp_path / f"{number}.json")
        traces.write(part, files[-1])
    assert traces.read(files) == traces.merge(parts())


def test_json_has_a_track_per_device_and_arrows_from_put_to_wait():
    events = traces.as_json(traces.merge(parts()))["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (0, "process 0"),
        (1, "process 1"),
        (0, "device 4"),
        (1, "device 5"),
        (1, "thread 3"),
    ]
    titles = [e["name"] for e in events if e["ph"] == "X"]
    assert {"wait for calls", "put 0 to 1", "multiply 0", "wait 1 from 1"} <= set(
        titles
    )
    assert {"all_gather_matmul (op 'a')", "GEMM of chunk 0"} <= set(titles)
    arrows = [(e["ph"], e["id"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [
        ("s", 0, 1, 5.999),
        ("f", 0, 0, 7.0),
        ("s", 1, 0, 1.999),
        ("f", 1, 1, 12.0),
    ]
    assert all(event["ts"] >= 0 for event in events if "ts" in event)


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', json.dumps({})])
def test_file_that_is_no_trace_is_an_error(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UnknownNameError, match="is not a trace that jax_ub wrote"):
        traces.read([path])
