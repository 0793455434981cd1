"""Traces as data: merging processes, what is exposed, and files."""

import dataclasses
import json

import pytest

from jax_ub._src.tools.trace import chrome, replayed, spans
from jax_ub._src.tools.trace.spans import Call, Span, Trace
from jax_ub.errors import UnknownNameError

CALL = Call("op 'a'", "all_gather_matmul", "ring_exchange", 2, 0, (4, 5), "f32[8, 8]")
OTHER = dataclasses.replace(CALL, label="op 'b'")
SPAN = Span(1000, 2000, 0, 0, 0, "multiply", 0, 0, 0, -1, "operand")


def span(kind, rank, begin_us, end_us, **what):
    begin_ns, end_ns = int(1000 * begin_us), int(1000 * end_us)
    return dataclasses.replace(
        SPAN, kind=kind, rank=rank, begin_ns=begin_ns, end_ns=end_ns, **what
    )


# Rank 0 computes chunk 0 for 4 us, puts it in 1 us; rank 1 the same, and waits longer.
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


def test_processes_share_the_calls_that_they_made_together():
    found = spans.merged(parts())
    assert found.calls == (CALL,)
    assert sorted(found.spans, key=repr) == sorted(RING, key=repr)
    assert found.num_dropped == 1
    assert found.seconds_of(0) == pytest.approx(16e-6)


def test_the_second_call_of_a_label_is_another_call():
    one = Trace((CALL, OTHER, CALL), (dataclasses.replace(SPAN, call=2),))
    two = Trace((OTHER, CALL, CALL), (dataclasses.replace(SPAN, call=2, process=1),))
    found = spans.merged([one, two])
    assert found.calls == (CALL, OTHER, CALL)
    assert {span.call for span in found.spans} == {2}


def test_what_ranks_wait_for_is_exposed():
    # 1 + 1 us of rank 0, 2 us of rank 1.
    assert spans.merged(parts()).exposed_s() == {"op 'a'": pytest.approx(2e-6)}
    both = (*RING, span("barrier", -1, 20, 22), span("barrier", -1, 20, 26, process=1))
    assert Trace((CALL,), both).exposed_s() == {"op 'a'": pytest.approx(6e-6)}
    assert Trace((CALL,), ()).exposed_s() == {"op 'a'": 0.0}
    assert Trace((CALL,), ()).seconds_of(0) == 0.0


def test_a_file_holds_everything(tmp_path):
    files = []
    for number, part in enumerate(parts()):
        files.append(tmp_path / f"{number}.json")
        chrome.write(part, files[-1])
    assert chrome.read(files) == spans.merged(parts())


def test_perfetto_sees_tracks_by_device_and_arrows_from_put_to_wait():
    events = chrome.as_json(spans.merged(parts()))["traceEvents"]
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
    assert {"op 'a'", "GEMM of chunk 0"} <= set(titles)
    arrows = [(e["ph"], e["id"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [
        ("s", 0, 1, 5.999),
        ("f", 0, 0, 7.0),
        ("s", 1, 0, 1.999),
        ("f", 1, 1, 12.0),
    ]
    assert all(event["ts"] >= 0 for event in events if "ts" in event)


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', json.dumps({})])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UnknownNameError, match="is not a trace that jax_ub wrote"):
        chrome.read([path])


def test_the_schedule_is_replayed_with_the_steps_own_times():
    found = replayed.replayed(CALL, RING)
    multiplied = [s for s in found.spans if s.kind == "multiply"]
    assert [s.end_s - s.start_s for s in multiplied] == [pytest.approx(4e-6)] * 4
    puts = [s for s in found.spans if s.kind == "put"]
    assert [s.end_s - s.start_s for s in puts] == [pytest.approx(1e-6)] * 2
    # Put, multiply, multiply: nothing to wait for.
    assert found.seconds == pytest.approx(9e-6)


def test_one_product_of_everything_takes_its_own_time():
    call = dataclasses.replace(CALL, op="matmul_reduce_scatter", method="external")
    each = [
        (
            span("multiply", r, 0, 8, chunk=-1),
            span("put", r, 8, 9),
            span("reduce", r, 9, 12),
        )
        for r in range(2)
    ]
    found = replayed.replayed(call, [s for group in each for s in group])
    kinds = {s.kind: s.end_s - s.start_s for s in found.spans}
    assert kinds["multiply"] == pytest.approx(8e-6)
    assert kinds["reduce"] == pytest.approx(3e-6)
    assert found.seconds == pytest.approx(12e-6)


def test_a_call_without_steps_has_no_schedule_to_replay():
    assert replayed.replayed(CALL, [s for s in RING if s.kind == "call"]) is None
