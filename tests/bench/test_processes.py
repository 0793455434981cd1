"""The benchmark over processes: one tiny job, and what becomes of its figures."""

import dataclasses
import json
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

from jax_ub import __main__, _cpu
from jax_ub._src.tools.bench import cases, goals, process_cases, table
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.bench.results import Result
from jax_ub._src.tools.bench.statistics import Summary
from jax_ub._src.tools.bench.timing import Candidate
from jax_ub._src.tools.bench.workloads import Shape


def result(op, time_us, *, speedup=2.0, in_process=1.0, processes=2):
    return Result(
        Case(op, "", "float32", 2, Shape(8, 8, 8), 1024, [], num_processes=processes),
        {cases.OWN: Summary(time_us, 0.1, time_us)},
        {cases.BEST: Summary(speedup, 0.2, speedup)},
        {cases.IN_PROCESS: Summary(in_process, 0.1, in_process)},
        0.0,
    )


def test_a_job_of_two_processes_finds_every_figure(tmp_path, capfd):
    path = tmp_path / "found.json"
    often = ["--rounds", "2", "--patience", "2"]
    arguments = ["--processes", "2", "--quick", *often, "--dtypes", "f32"]
    ops = ["--ops", "matmul_reduce_scatter,barrier", "--json", str(path)]
    assert __main__.main(["bench", *arguments, *ops]) == 0
    found = json.loads(path.read_text())
    assert [r["op"] for r in found["results"]] == ["matmul_reduce_scatter", "barrier"]
    row = found["results"][0]
    assert row["num_processes"] == row["num_ranks"] == 2
    assert set(row["times_us"]) == {
        "jax_ub",
        "xla_best",
        "xla_naive",
        "in_process",
        "plain_gemm",
        "peak",
    }
    assert {"xla_best", "xla_naive"} == set(row["speedups"])
    assert {"in_process", "plain_gemm", "peak"} == set(row["shares"])
    limits = {v["measure"]: v["limit"] for v in found["verdicts"]}
    assert limits["speed-up over xla_best"] > 0
    assert limits["time over that in one process"] is None
    assert limits["microseconds a call"] is None
    assert found["results"][1]["times_us"]["jax_ub"]["median"] > 0
    assert found["fallbacks"] == []
    assert {v["num_processes"] for v in found["verdicts"]} == {2}
    report = capfd.readouterr().out
    assert "| barrier x2" in report
    assert "\n[0]" not in report  # what processes say on the way


def test_a_process_that_fails_ends_those_that_wait_for_it(tmp_path):
    # They wait in a collective of JAX, and JAX would wait at its exit for them.
    program = tmp_path / "job.py"
    program.write_text(f"""
import json
import jax
from jax_ub._src.tools.bench.process_cases import Bench
from jax_ub._src.tools.bench.process_command import part

forward = Bench.forward

def forward_or_fail(bench, *case):
    if jax.process_index() == 1:
        raise ValueError("boom")
    return forward(bench, *case)

Bench.forward = forward_or_fail
told = dict(ops=["all_gather_matmul"], dtypes=["float32"], shapes=[[8, 8, 8]], rounds=2)
told |= dict(method="auto", patience=1)
part(json.dumps(told | dict(path={str(tmp_path / "found.json")!r})))
""")
    launch = [sys.executable, "-m", "jax_ub", "launch", "-n", "2", str(program)]
    ended = subprocess.run(launch, text=True, capture_output=True, timeout=100)
    assert ended.returncode == 1
    assert "ValueError: boom" in ended.stderr


def test_figures_survive_the_way_from_process_to_process():
    here = result("all_gather_matmul", 10.0)
    there = Result.from_json(json.loads(json.dumps(here.as_json())))
    assert dataclasses.replace(there, case=here.case) == here
    assert dataclasses.asdict(there.case) == dataclasses.asdict(here.case)


def test_goals_over_processes_are_not_those_of_one():
    over = goals.judge([result("all_gather_matmul", 10.0, speedup=1.4, in_process=0.8)])
    assert [(v.measure, v.reached) for v in over] == [
        ("speed-up over xla_best", False),
        ("time over that in one process", False),
    ]
    assert over[1].value == pytest.approx(1.25)
    assert table.verdict_table(over)[1].startswith("| all_gather_matmul x2 ")


@pytest.mark.parametrize(("time_us", "reached"), [(9.0, True), (11.0, False)])
def test_a_barrier_of_two_processes_has_ten_microseconds(time_us, reached):
    [verdict] = goals.judge([result("barrier", time_us)])
    assert verdict.reached is reached


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "barrier"], "a barrier is between processes. Add --processes 2."),
        (["--processes", "2", "--ops", "gemm"], "none of gemm is compared over proc"),
        (["--processes", "3"], "does not divide into 3 ranks"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capsys):
    assert __main__.main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_job_that_fails_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert __main__.main(["bench", "--processes", "2", "--quick"]) == 2
    assert "2 processes failed with exit status 1" in capsys.readouterr().err


def test_contenders_that_disagree_are_an_error():
    job = types.SimpleNamespace(num_processes=2)
    bench = process_cases.Bench(job, "auto", 1, 1)
    together = [
        Candidate(name, lambda value=value: jnp.full(3, value), [])
        for name, value in ((cases.OWN, 1.5), (cases.BEST, 1.0))
    ]
    text = "in 2 processes: jax_ub differs from xla_best by 5.00e-01"
    with pytest.raises(ArithmeticError, match=text):
        bench._check("matmul_all_reduce", "float32", Shape(8, 8, 8), together)


def test_barriers_are_timed_until_the_communicator_is_closed():
    communicator = _cpu.connect(
        _cpu.endpoint(),
        name="alone",
        devices=[-2, -3],
        processes=[0, 0],
        process=0,
        addresses={},
        tokens={},
        half_bytes=4096,
        timeout_s=10.0,
    )
    assert communicator.barrier_seconds(10) > 0
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count is {count}, expected at least 1"):
            communicator.barrier_seconds(count)
    communicator.close()
    with pytest.raises(RuntimeError, match="closed its communicator"):
        communicator.barrier_seconds(1)
