"""The engine's recorder, as Python sees it."""

import jax
import numpy as np
import pytest
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import _cpu

SHAPES = ((16, 8), (8, 12))


def run(method):
    program = on_ranks(
        lambda x, w: ub.all_gather_matmul(
            x, w, axis_name="tp", method=method, ub_name="traced"
        ),
        tp_mesh(2),
        (P("tp"), P(None, "tp")),
        P(None, "tp"),
    )
    jax.block_until_ready(program(*(np.ones(shape, np.float32) for shape in SHAPES)))


def test_a_traced_call_has_its_name_and_the_steps_of_its_schedule():
    _cpu.start_trace()
    run("ring_exchange")
    _cpu.stop_trace()
    trace = _cpu.read_trace()
    [call] = trace["calls"]
    assert call["label"] == "all_gather_matmul (ub_name 'traced')"
    assert (call["op"], call["method"]) == ("all_gather_matmul", "ring_exchange")
    assert (call["num_ranks"], call["devices"]) == (2, [0, 1])
    assert call["operands"] == "f32[8, 8] f32[8, 6]"
    assert trace["num_dropped"] == 0
    spans = [span for thread in trace["threads"] for span in thread]
    steps = _cpu.schedule("all_gather_matmul", "ring_exchange", 1, 2, 1)
    taken = [(s[3], s[5], s[7]) for s in sorted(spans) if s[4] == 1]
    around = ("call", "gather", "unit")
    assert [one for one in taken if one[0] not in around] == [
        (step.kind, step.chunk, step.peer) for step in steps
    ]
    assert all(begin <= end for begin, end, *_ in spans)


def test_a_stopped_trace_records_nothing():
    _cpu.start_trace()
    _cpu.stop_trace()
    run("direct")
    trace = _cpu.read_trace()
    assert (trace["calls"], trace["threads"]) == ([], [])


def test_a_trace_without_events_is_rejected():
    with pytest.raises(ValueError, match="events_per_thread is 0, expected at least 1"):
        _cpu.start_trace(0)
