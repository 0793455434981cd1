"""`python -m jax_ub trace`."""

import subprocess
import sys

import pytest

from jax_ub import __main__
from jax_ub._src.tools.trace import chrome
from jax_ub._src.tools.trace.script import run_script

SCRIPT = """
import sys
import jax, numpy as np
import jax_ub as ub
from jax import P

assert sys.argv == ["{script}", "--flag"], sys.argv
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
f = jax.shard_map(
    lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
    mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
for _ in range(3):
    jax.block_until_ready(jax.jit(f)(np.ones((8, 4)), np.ones((4, 8))))
"""
TINY = ["--tp", "2", "--shape", "16x16x16", "--repeats", "3"]


def test_an_op_on_its_own_is_recorded_drawn_and_summarised(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "found.json", tmp_path / "found.png"
    arguments = ["--op", "matmul_reduce_scatter", "--method", "pipeline", *TINY]
    files = ["--json", str(trace), "--png", str(picture)]
    assert __main__.main(["trace", *arguments, *files]) == 0
    assert len(chrome.read([trace]).calls) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "matmul_reduce_scatter, pipeline, P = 2" in text


def test_files_are_merged_and_one_label_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "found.json", tmp_path / "found.png"
    arguments = ["--op", "all_gather_matmul", *TINY, "--json", str(trace)]
    assert __main__.main(["trace", *arguments]) == 0
    label = "all_gather_matmul"
    files = ["--merge", str(trace), str(trace), "--png", str(picture)]
    assert __main__.main(["trace", *files, "--label", label]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert __main__.main(["trace", *files, "--label", "all_gather"]) == 2
    assert "no call is named 'all_gather'. " in capsys.readouterr().err


def test_a_script_is_recorded_with_its_arguments(tmp_path):
    script, trace = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT.format(script=script))
    command = ["-m", "jax_ub", "trace", "--json", str(trace), str(script), "--flag"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "3 " in done.stdout.splitlines()[1]
    assert "direct, P = 2" in done.stdout
    assert len(chrome.read([trace]).calls) == 3


def test_a_script_that_exits_is_recorded_and_its_status_returned(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(script=script) + "\nsys.exit(3)")
    command = ["-m", "jax_ub", "trace", str(script), "--flag"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 3, done.stderr
    assert "direct, P = 2" in done.stdout


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [("sys.exit()", 0, ""), ("sys.exit(2)", 2, ""), ("sys.exit('why')", 1, "why\n")],
)
def test_exit_status_of_a_script_is_python_s(
    end, status, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{end}")
    assert run_script(str(script), []) == status
    assert capsys.readouterr().err == text


def test_a_script_s_processes_do_not_depend_on_the_ranks_of_an_op(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax\njax.distributed.initialize()\nassert jax.local_device_count() == 2"
    )
    options = ["--processes", "3", "--devices-per-process", "2"]
    assert __main__.main(["trace", *options, str(script)]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("options", [(), ("--",), ("--processes", "1", "--")])
def test_a_script_has_all_its_arguments(tmp_path, capsys, monkeypatch, options):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert __main__.main(["trace", *options, str(script), "--", "--json", "x"]) == 0
    assert "['--', '--json', 'x']" in capsys.readouterr().out


def test_unknown_options_show_the_usage_of_their_command(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["trace", "--bogus"])
    text = capsys.readouterr().err
    assert text.startswith("usage: python -m jax_ub trace ")
    assert "unrecognized arguments: --bogus" in text


def test_two_processes_are_merged_on_one_clock(tmp_path, capfd):
    path = tmp_path / "found.json"
    arguments = ["--processes", "2", "--op", "matmul_reduce_scatter", *TINY]
    assert __main__.main(["trace", *arguments, "--json", str(path)]) == 0
    found = chrome.read([path])
    assert len(found.calls) == 3
    for index in range(3):
        whole = [s for s in found.of_call(index) if s.kind == "call"]
        assert {(s.process, s.rank) for s in whole} == {(0, 0), (1, 1)}
        # A scatter ends nowhere before it began everywhere.
        assert max(s.begin_ns for s in whole) < min(s.end_ns for s in whole)
    assert "direct, P = 2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give one of a script, --op or --merge"),
        (["--"], "give one of a script, --op or --merge"),
        (["--op", "all_gather_matmul", "script.py"], "give one of a script, --op"),
        (["--op", "matmul_all_reduc"], "Did you mean 'matmul_all_reduce'?"),
        (["no_such.py"], "there is no script 'no_such.py'"),
        (["/"], "there is no script '/'"),
        (["--devices-per-process", "2", __file__], "Add --processes 2."),
        (
            ["--op", "matmul_all_reduce", "--processes", "2"]
            + ["--devices-per-process", "2"],
            "--devices-per-process is of a script",
        ),
        (["--merge", "no_such.json"], "there is no file 'no_such.json'"),
        (["--merge", "/"], "there is no file '/'"),
        (
            ["--merge", __file__, "--label", "up"],
            "--label 'up' is what a picture shows",
        ),
        (
            ["--op", "matmul_all_reduce", "--repeats", "0"],
            "--repeats 0 is not positive",
        ),
        (["--op", "matmul_all_reduce", "--dtype", "f33"], "--dtype 'f33' is not"),
        (["--op", "matmul_all_reduce", "--method", "rnig"], "'rnig' is not a method"),
        (["--processes", "0", "script.py"], "--processes 0 is not positive"),
        (["--op", "matmul_all_reduce", "--tp", "0"], "--tp 0 does not divide into"),
        (
            ["--op", "matmul_all_reduce", "--tp", "3", "--processes", "2"],
            "--tp 3 does not divide into --processes 2",
        ),
        (["--op", "matmul_all_reduce", "--shape", "8x8"], "'8x8' is not MxKxN of mul"),
        (["--op", "matmul_all_reduce", "--shape", "6x8x8"], "'6x8x8' is not MxKxN"),
        (
            ["--op", "all_gather_matmul", "--tp", "512", "--shape", "512x512x512"],
            "--tp 512, but there are 16 devices",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capfd):
    assert __main__.main(["trace", *arguments]) == 2
    assert text in capfd.readouterr().err


def test_processes_that_fail_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    arguments = ["--processes", "2", __file__]
    assert __main__.main(["trace", *arguments]) == 2
    assert "the processes failed with exit status 1" in capsys.readouterr().err


def test_a_script_that_joins_no_job_is_refused_in_several_processes(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("")
    assert __main__.main(["trace", "--processes", "2", str(script)]) == 2
    assert "Call jax.distributed.initialize() in it." in capfd.readouterr().err
