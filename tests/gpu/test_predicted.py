"""Predicted times of calls on GPUs, for XLA's scheduler and for "auto"."""

import dataclasses
import functools
import re
import types

import pytest
from cuda_programs import StandIn, called, collectives, cuda_text, shape
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.lowering_log import recording
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.prediction.hardware import HARDWARE
from jax_ub._src.primitives import matmuls
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.mesh import find_ranks
from jax_ub._src.runtime import cuda_engine
from jax_ub.errors import UnsupportedOverlapError

AUTO = MethodChoice(Method.AUTO)
H100 = "NVIDIA H100 80GB HBM3"
# Tokens for which XLA and the overlapped call are predicted to be faster, on 8 ranks.
FEW, MANY = 512, 8192


@pytest.fixture
def gpus(monkeypatch):
    """Lowers calls as if the mesh had 8 processes with GPUs of settings.kind.

    Returns the settings, which a test may change: the kind of the GPUs, and how many
    `each` process has.
    """
    settings = types.SimpleNamespace(kind=H100, each=1)

    def ranks_on_gpus(*arguments):
        found = find_ranks(*arguments)
        devices = tuple(
            types.SimpleNamespace(
                platform="gpu", device_kind=settings.kind, process_index=i
            )
            for i in range(8)
            for _ in range(settings.each)
        )
        return dataclasses.replace(found, devices=devices)

    monkeypatch.setattr(cuda_engine, "load", StandIn)
    name = "jax_ub._src.primitives.lowering.find_ranks"
    monkeypatch.setattr(name, ranks_on_gpus)
    return settings


def column(tokens, method=None):
    function = functools.partial(ub.all_gather_matmul, axis_name="tp", method=method)
    specs = (P("tp"), P(None, "tp"))
    run = on_ranks(function, tp_mesh(8), specs, P(None, "tp"))
    sizes = (tokens, 8192), (8192, 10240)
    operands = [shape(*one, dtype="bfloat16") for one in sizes]
    return cuda_text(run, *operands)


def latencies(text):
    return [int(ns) for ns in re.findall(r'latency_metadata = "(\d+)"', text)]


def test_the_predicted_time_is_passed_to_xla(gpus):
    sizes = (MANY, 8192, 10240, 8, "bfloat16", HARDWARE["h100"])
    found = estimate("all_gather_matmul", AUTO, *sizes)
    assert latencies(column(MANY)) == [round(1e9 * found.seconds)]
    gpus.kind = "NVIDIA GB999"
    assert latencies(column(MANY)) == [round(1e9 * found.seconds)]


def pipelined(num_splits):
    """Returns an AG+GEMM with this number of splits, its operands and its time."""
    choice = MethodChoice(Method.PIPELINE, num_splits)
    ranks = {"axis_name": ("tp",), "num_ranks": 8}
    execution = Execution(label="call", choice=choice, **ranks)

    def function(x, w):
        ((y,), _) = matmuls.all_gather_matmul(execution, x, (w,), out_dtype=x.dtype)
        return y

    run = on_ranks(function, tp_mesh(8), (P("tp"), P(None, "tp")), P(None, "tp"))
    operands = [shape(64, 32, dtype="bfloat16"), shape(32, 64, dtype="bfloat16")]
    sizes = (64, 32, 64, 8, "bfloat16", HARDWARE["h100"])
    return run, operands, estimate("all_gather_matmul", choice, *sizes).seconds


def test_the_predicted_time_includes_the_splits_of_a_call(gpus):
    for num_splits in (1, 4):
        run, operands, seconds = pipelined(num_splits)
        assert latencies(cuda_text(run, *operands)) == [round(1e9 * seconds)]


def test_explain_predicts_the_splits_of_a_call():
    for num_splits in (1, 4):
        run, operands, seconds = pipelined(num_splits)
        (row,) = ub.explain(run, *operands, hardware="h100").rows
        assert row.predicted_s == seconds


def test_few_tokens_are_left_to_xla_and_that_is_recorded(gpus):
    ub.fallbacks(clear=True)
    text = column(FEW)
    assert not called(text)
    assert collectives(text) == {"all_gather": 1}
    (fallback,) = ub.fallbacks(clear=True)
    pattern = r"overlapped it is predicted to take (\d+) us, and as XLA's .* (\d+) us"
    overlapped_us, xla_us = map(int, re.search(pattern, fallback.reason).groups())
    assert overlapped_us > xla_us
    sizes = (FEW, 8192, 10240, 8, "bfloat16", HARDWARE["h100"])
    found = estimate("all_gather_matmul", AUTO, *sizes)
    assert (found.method, round(1e6 * found.seconds)) == ("xla", xla_us)
    assert "`python -m jax_ub tune` measures it" in fallback.reason
    with recording() as lowered:
        assert called(column(MANY)) == {"all_gather_matmul": 1}
        assert called(column(FEW, "pipeline")) == {"all_gather_matmul": 1}
    assert [one.method for one in lowered] == [Method.PIPELINE] * 2
    assert not ub.fallbacks()


def test_collectives_and_sums_in_one_exchange_are_not_left_to_xla(gpus):
    def function(x):
        return ub.all_reduce(x, axis_name="tp")

    run = on_ranks(function, tp_mesh(8), P("tp"), P(), check_vma=False)
    for rows in (8 * 16, 8 * MANY):
        assert called(cuda_text(run, shape(rows, 8192, dtype="bfloat16")))
    reduce = functools.partial(ub.matmul_all_reduce, axis_name="tp")
    run = on_ranks(reduce, tp_mesh(8), (P(None, "tp"), P("tp")), P())
    for rows, is_called in ((16, True), (256, False)):
        sizes = (rows, 8192), (8192, 8192)
        text = cuda_text(run, *(shape(*one, dtype="bfloat16") for one in sizes))
        assert bool(called(text)) is is_called


def test_unknown_gpus_overlap_all_sizes(gpus):
    gpus.kind = "NVIDIA GB999"
    assert called(column(FEW)) == {"all_gather_matmul": 1}


def test_calls_that_hosts_enqueue_need_more_tokens(gpus):
    tokens = 1024
    assert called(column(tokens))
    gpus.each = 8
    assert not called(column(tokens))
    assert called(column(MANY))


def test_a_method_that_cannot_run_is_still_an_error(gpus):
    with pytest.raises(UnsupportedOverlapError, match="pushed into slots"):
        column(MANY, "direct")
