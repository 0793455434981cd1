"""Tests `python -m jax_ub trace`."""

import dataclasses
import re
import sys

import jax
import pytest
from tools import jax_ub

from jax_ub import __main__
from jax_ub._src.tools.command_line import run_program
from jax_ub._src.tools.trace import command as trace_command
from jax_ub._src.tools.trace import traces
from jax_ub._src.tools.trace.traces import Call, Span, Trace

SCRIPT = """
import sys
import jax, numpy as np
import jax_ub as ub
from jax import P

assert sys.argv == ["{script}", "--flag"], sys.argv
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
traces = []
def column(x, w):
    traces.append(x)
    return ub.all_gather_matmul(x, w, axis_name="tp")
f = jax.jit(jax.shard_map(
    column, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
for _ in range(3):
    jax.block_until_ready(f(np.ones((8, 4)), np.ones((4, 8))))
assert len(traces) == 1  # JAX traces again if the command imports jax.extend later
"""
REDUCE = ["--op", "matmul_all_reduce"]
TINY = ["--tp", "2", "--shape", "16x16x16", "--repeats", "3"]


def test_single_op_is_recorded_and_summarized(tmp_path, capsys):
    trace = tmp_path / "found.json"
    arguments = ["--op", "matmul_reduce_scatter", "--method", "pipeline", *TINY]
    assert __main__.main(["trace", *arguments, "--json", str(trace)]) == 0
    assert len(traces.read([trace]).calls) == 3
    head, row = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == [
        *("calls", "median us", "waits us", "where", "op", "method", "P"),
        "operands of a rank",
    ]
    assert re.fullmatch(
        r" +3 +[\d.]+ +[\d.]+  matmul_reduce_scatter  matmul_reduce_scatter  "
        r"pipeline  2  f32\[16, 8\] f32\[8, 16\]",
        row,
    )


def test_summary_has_medians_without_the_first_call():
    call = Call("column", "all_gather_matmul", "direct", 1, 0, (0,), "f32[8, 8]")
    waits_us = (900, 1, 3, 2)
    recorded = [
        Span(0, 1000 * (us + extra), 0, 0, i, kind, 0, -1, 0, -1, "operand")
        for i, us in enumerate(waits_us)
        for kind, extra in ((traces.CALL, 5), ("wait", 0))
    ]
    _, row = trace_command.summary(Trace((call,) * 4, tuple(recorded)))
    assert row.split()[:3] == ["4", "7.0", "2.0"]


def test_summary_has_a_row_for_each_op_of_a_layer():
    shape = "f32[8, 8] f32[8, 8]"
    forward = Call(
        "column (ub_name 'up')", "all_gather_matmul", "direct", 1, 0, (0,), shape
    )
    wgrad = dataclasses.replace(forward, op="wgrad")
    larger = dataclasses.replace(forward, operands="f32[9, 8] f32[8, 8]")
    calls = (forward, wgrad, larger, wgrad)
    ends_us = (1, 20, 3, 40)
    found = tuple(
        Span(0, 1000 * end_us, 0, 0, i, "call", 0, -1, 0, -1, "operand")
        for i, end_us in enumerate(ends_us)
    )
    _, *rows = trace_command.summary(Trace(calls, found))
    assert [re.split("  +", row.strip()) for row in rows] == [
        ["1", "1.0", "0.0", "up", "all_gather_matmul", "direct", "1", shape],
        ["2", "40.0", "0.0", "up", "wgrad", "direct", "1", shape],
        ["1", "3.0", "0.0", "up", "all_gather_matmul", "direct", "1", larger.operands],
    ]


def test_files_are_merged(tmp_path, capsys):
    trace, merged = tmp_path / "found.json", tmp_path / "merged.json"
    arguments = ["--op", "all_gather_matmul", *TINY, "--json", str(trace)]
    assert __main__.main(["trace", *arguments]) == 0
    options = ["--json", str(merged), "--merge", str(trace)]
    assert __main__.main(["trace", *options]) == 0
    assert traces.read([merged]) == traces.read([trace])
    capsys.readouterr()
    assert __main__.main(["trace", "--merge", str(trace), str(merged)]) == 2
    text = f"'{trace}' and '{merged}' both have process 0. Give one file for each"
    assert text in capsys.readouterr().err


def test_script_is_recorded_with_its_arguments(tmp_path):
    script, trace = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT.format(script=script))
    done = jax_ub("trace", "--json", trace, script, "--flag")
    assert done.returncode == 0, done.stderr
    assert "3 " in done.stdout.splitlines()[1]
    assert re.search("direct +2 ", done.stdout)
    assert len(traces.read([trace]).calls) == 3


def test_a_script_without_calls_of_jax_ub_is_reported(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    assert __main__.main(["trace", str(script)]) == 0
    assert capsys.readouterr().out == "no call of jax_ub ran on the CPU engine\n"


def test_the_trace_of_a_script_that_fails_is_written(tmp_path):
    script, trace = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text("raise ValueError('boom')")
    with pytest.raises(ValueError, match="boom"):
        __main__.main(["trace", "--json", str(trace), str(script)])
    assert traces.read([trace]).calls == ()


def test_an_op_without_events_is_an_error(monkeypatch, capsys):
    # As on GPUs, whose engine records nothing.
    monkeypatch.setattr(trace_command, "_prepare_op", lambda given: lambda: 0)
    assert __main__.main(["trace", "--op", "matmul_all_reduce", *TINY]) == 2
    text = "trace: no call of --op matmul_all_reduce ran on the CPU engine, and nothing"
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_each_process_of_a_job_writes_its_own_file(tmp_path):
    script, trace = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text("import jax; jax.distributed.initialize(); jax.devices()")
    command = ["-m", "jax_ub", "trace", "--json", trace, script]
    assert jax_ub("launch", "-n", 2, *command).returncode == 0
    assert not trace.exists()
    for process in range(2):
        traces.read([tmp_path / f"found.{process}.json"])


def test_script_that_exits_is_recorded_and_its_status_returned(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(script=script) + "\nsys.exit(3)")
    done = jax_ub("trace", script, "--flag")
    assert done.returncode == 3, done.stderr
    assert re.search("direct +2 ", done.stdout)


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [("sys.exit()", 0, ""), ("sys.exit(2)", 2, ""), ("sys.exit('why')", 1, "why\n")],
)
def test_exit_status_of_a_script_equals_that_of_python(
    end, status, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{end}")
    assert run_program(str(script), []) == status
    assert capsys.readouterr().err == text


def test_a_module_is_run_as_by_python(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = (
        "import sys, pathlib\nassert __package__ == 'package'\nsys.exit(len(sys.argv))"
    )
    (folder / "train.py").write_text(text)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["trace", "--json", str(tmp_path / "found.json"), "-m", "package.train"]
    assert __main__.main([*command, "--steps", "2"]) == 3
    assert traces.read([tmp_path / "found.json"]).calls == ()


@pytest.mark.slow
def test_processes_of_a_program_have_the_requested_devices(
    tmp_path, capfd, monkeypatch
):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax\njax.distributed.initialize()\nassert jax.local_device_count() == 2"
    )
    options = ["--processes", "3", "--devices-per-process", "2"]
    assert __main__.main(["trace", *options, str(script)]) == 0, capfd.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as under `python -m jax_ub`
    assert __main__.main(["trace", *options, "-m", "script"]) == 0


@pytest.mark.parametrize("options", [(), ("--",), ("--processes", "1", "--")])
def test_arguments_of_the_script_are_passed_unchanged(
    tmp_path, capsys, monkeypatch, options
):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert __main__.main(["trace", *options, str(script), "--", "--json", "x"]) == 0
    assert "['--', '--json', 'x']" in capsys.readouterr().out


def test_options_behind_the_script_are_noted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    options = ["--json", "x", "--steps", "--devices-per-process=2"]
    assert __main__.main(["trace", str(script), *options]) == 0
    out, err = capsys.readouterr()
    assert str(options) in out
    assert err == (
        "trace: note: the script gets --json, --devices-per-process. Options of trace "
        "itself precede the script.\n"
    )
    own = ["--steps", "--run", "--command=x", "--program", "--part", "--", "--json"]
    assert __main__.main(["trace", str(script), *own]) == 0
    assert capsys.readouterr().err == ""


def test_unknown_option_shows_the_usage_of_the_command(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["trace", "--bogus"])
    text = capsys.readouterr().err
    assert text.startswith("usage: python -m jax_ub trace ")
    assert "unrecognized arguments: --bogus" in text


@pytest.mark.slow
def test_traces_of_two_processes_are_merged_on_one_clock(tmp_path, capfd):
    path = tmp_path / "found.json"
    arguments = ["--processes", "2", "--op", "matmul_reduce_scatter", *TINY]
    assert __main__.main(["trace", *arguments, "--json", str(path)]) == 0
    found = traces.read([path])
    assert len(found.calls) == 3
    for index in range(3):
        whole = [s for s in found.of_call(index) if s.kind == "call"]
        assert {(s.process, s.rank) for s in whole} == {(0, 0), (1, 1)}
        # No rank's reduce-scatter ends before all have started.
        assert max(s.begin_ns for s in whole) < min(s.end_ns for s in whole)
    assert re.search("direct +2 ", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give one of a script, --op or --merge"),
        (["--"], "give one of a script, --op or --merge"),
        (["--op", "all_gather_matmul", "script.py"], "give one of a script, --op"),
        (["no_such.py"], "there is no script 'no_such.py'. To run a module, put -m"),
        (["-m", "no_such.x"], "trace: there is no module 'no_such.x'. Give a name as"),
        (["-m", ".x"], "trace: there is no module '.x'. Give a name as after"),
        (["-m"], "trace: give one of a script, --op or --merge"),
        (["--op", "matmul_all_reduce", "-m"], "trace: give one of a script, --op or"),
        (["/"], "there is no script '/'"),
        (["--devices-per-process", "2", __file__], "Add --processes 2."),
        (
            [*REDUCE, "--processes", "2", "--devices-per-process", "2"],
            "--devices-per-process applies to scripts",
        ),
        (["--merge", "no_such.json"], "cannot read 'no_such.json': No such file"),
        (["--merge", "/"], "cannot read '/': Is a directory"),
        (
            [*REDUCE, "--tp", "3", "--processes", "2"],
            "--tp 3 is not a multiple of --processes 2",
        ),
        ([*REDUCE, "--shape", "6x8x8"], "--shape 6x8x8 does not divide into --tp 4"),
        (["--tp", "2", __file__], "--tp 2 applies to --op only. Leave it out, or"),
        (["--shape", "8x8x8", __file__], "--shape 8x8x8 applies to --op only"),
        ([*REDUCE, "--method", "xla"], 'the method "xla" has no events to trace'),
        (
            [*REDUCE, "--method", "pipeline", "--tp", "1"],
            "--method pipeline has no effect on --tp 1",
        ),
        (["--merge", "a", "--processes", "2"], "--processes 2 has no effect on --mer"),
        (
            [*REDUCE, "--tp", "512", "--shape", "512x512x512"],
            "P = 512 needs as many devices, but jax has 16. Use fewer",
        ),
    ],
)
def test_invalid_arguments_are_errors(arguments, text, capfd):
    jax.devices()  # JAX cannot add devices after its start
    assert __main__.main(["trace", *arguments]) == 2
    assert text in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "matmul_all_reduc"], "Did you mean 'matmul_all_reduce'?"),
        ([*REDUCE, "--dtype", "float32"], "'float32' is not known. Did you mean 'f32'"),
        ([*REDUCE, "--method", "rnig"], "--method: 'rnig' is not known. Known: 'auto'"),
        ([*REDUCE, "--shape", "8x8"], "--shape: shape '8x8' is not MxKxN"),
        ([*REDUCE, "--shape", "0x8x8"], "--shape: shape '0x8x8' is not MxKxN"),
        ([*REDUCE, "--repeats", "0"], "argument --repeats: '0' is not a positive"),
        ([*REDUCE, "--tp", "0"], "argument --tp: '0' is not a positive integer"),
        (["--processes", "0", "x.py"], "argument --processes: '0' is not a positive"),
    ],
)
def test_invalid_values_name_their_option(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["trace", *arguments])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"), [([__file__], 7), (["--op", "matmul_all_reduce"], 2)]
)
def test_failed_processes_are_an_error(
    arguments, status, tmp_path, monkeypatch, capsys
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert __main__.main(["trace", "--processes", "2", *arguments]) == status
    assert "trace: 2 processes failed with exit status 7" in capsys.readouterr().err


@pytest.mark.slow
def test_script_in_several_processes_must_initialize_jax_distributed(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("")
    assert __main__.main(["trace", "--processes", "2", str(script)]) == 2
    assert "Call jax.distributed.initialize() in it." in capfd.readouterr().err
