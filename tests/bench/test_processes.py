"""`bench --processes`: a job of two tiny processes, and its errors."""

import json
import subprocess
import sys

import pytest

from jax_ub import __main__, _cpu
from jax_ub._src import lowering_log
from jax_ub._src.tools.bench import linear

pytestmark = pytest.mark.slow


def test_a_job_of_two_processes_reports_every_figure(tmp_path, capfd):
    lowering_log.fallbacks(clear=True)
    path = tmp_path / "found.json"
    often = ["--rounds", "2", "--patience", "2"]
    arguments = ["--processes", "2", "--quick", *often, "--dtypes", "f32"]
    ops = ["--ops", "matmul_reduce_scatter,latency,barrier", "--json", str(path)]
    assert __main__.main(["bench", *arguments, *ops]) == 0
    found = json.loads(path.read_text())
    row, *others = found["results"]
    assert row["op"] == "matmul_reduce_scatter"
    assert [(r["op"], r["variant"]) for r in others] == [
        *(("latency", op) for op in (*linear.FORWARD_OPS, "all_reduce")),
        ("barrier", ""),
    ]
    assert row["num_processes"] == row["num_ranks"] == 2
    assert set(row["times_us"]) == {
        "jax_ub",
        "xla_best",
        "xla_naive",
        "xla_ring",
        "in_process",
        "plain_gemm",
        "copy",
        "peak",
    }
    assert {"xla_best", "xla_naive", "xla_ring"} == set(row["speedups"])
    assert {"in_process", "plain_gemm", "copy", "peak"} == set(row["shares"])
    assert all(r["times_us"]["jax_ub"]["median"] > 0 for r in others)
    assert all(r["speedups"]["xla_best"]["median"] > 0 for r in others[:-1])
    assert found["fallbacks"] == []
    report = capfd.readouterr().out
    assert "| barrier " in report
    assert "\n[0]" not in report  # what processes say on the way


def test_a_barrier_may_be_measured_alone(capfd):
    options = ["--processes", "2", "--quick", "--ops", "barrier"]
    assert __main__.main(["bench", *options]) == 0
    assert "| barrier " in capfd.readouterr().out


def test_a_failing_process_ends_the_job(tmp_path):
    # The other process waits in a collective of JAX.
    program = tmp_path / "job.py"
    program.write_text(f"""
import jax
from jax_ub import __main__
from jax_ub._src.tools.bench.measure import Job

seconds = Job._seconds

def seconds_or_fail(job, candidate):
    if jax.process_index() == 1:
        raise ValueError("boom")
    return seconds(job, candidate)

Job._seconds = seconds_or_fail
options = ["--processes", "2", "--quick", "--ops", "all_gather_matmul"]
__main__.main(["bench", *options, "--part", {str(tmp_path / "found")!r}])
""")
    launch = [sys.executable, "-m", "jax_ub", "launch", "-n", "2", str(program)]
    ended = subprocess.run(launch, text=True, capture_output=True, timeout=100)
    assert ended.returncode == 1
    assert "ValueError: boom" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "barrier"], "a barrier is between processes. Add --processes 2."),
        (["--processes", "2", "--ops", "gemm"], "none of gemm is compared over proc"),
        (["--processes", "3"], "does not divide into 3 ranks"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, text, capsys):
    assert __main__.main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_an_invalid_variable_ends_the_command_before_a_process_starts(
    monkeypatch, capfd
):
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "many")
    assert __main__.main(["bench", "--processes", "2", "--quick"]) == 2
    line, page = capfd.readouterr().err.splitlines()
    assert "JAX_UB_NUM_THREADS = 'many' is not a positive number of threads." in line
    assert page.startswith("See docs/functions.md#environment-variables in the repo")


def test_a_failed_job_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert __main__.main(["bench", "--processes", "2", "--quick"]) == 2
    assert "2 processes failed with exit status 1" in capsys.readouterr().err


def test_barriers_are_timed_until_the_communicator_is_closed():
    communicator = _cpu.connect(
        _cpu.endpoint(),
        name="alone",
        devices=[-2, -3],
        processes=[0, 0],
        process=0,
        addresses={},
        tokens={},
        buffer_bytes=4096,
        timeout_s=10.0,
    )
    assert communicator.barrier_seconds(10) > 0
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count is {count}, expected at least 1"):
            communicator.barrier_seconds(count)
    communicator.close()
    with pytest.raises(RuntimeError, match="closed its communicator"):
        communicator.barrier_seconds(1)
