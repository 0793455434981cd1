import argparse
import importlib.metadata
import json

import jax
import pytest
from covering import nightly

from jax_ub.__main__ import main
from jax_ub._src import lowering_log
from jax_ub._src.output import format_bytes
from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools import devices
from jax_ub._src.tools.bench import cases, command, measure, report
from jax_ub.errors import UnsupportedOverlapError


def run(tmp_path, *arguments):
    path = tmp_path / "found.json"
    status = main(
        ["bench", "--quick", "--rounds", "1", "--json", str(path), *arguments]
    )
    assert status == 0
    return json.loads(path.read_text())


def test_the_help_gives_every_op_and_the_defaults(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    defaults = cases.Options(ops=())
    assert f"(default: {','.join(defaults.dtypes)})" in text
    assert f"(default: {defaults.rounds}; with" in text
    assert f"(default: {', '.join(map(str, defaults.shapes))})" in text
    assert f"keep the calmest (default: {defaults.patience})" in text
    assert [op for op in command.OPS if op not in text] == []


@pytest.mark.parametrize(
    "op",
    [
        op if op == "all_gather_matmul" else pytest.param(op, marks=pytest.mark.slow)
        for op in command.OPS
        if op != "barrier"
    ],
)
def test_a_quick_run_writes_every_figure(op, tmp_path, capsys):

    lowering_log.fallbacks(clear=True)
    found = run(tmp_path, "--ops", op, "--dtypes", "f32")
    assert found["schema"] == command.SCHEMA
    assert found["options"]["ops"] == [op]
    assert {"date", "commit", "versions", "machine", "engine"} <= set(found)
    assert "engine" not in str(found["fallbacks"])
    assert found["results"]
    for result in found["results"]:
        assert result["op"] == op
        assert result["dtype"] == "float32"
        assert result["times_us"]["jax_ub"]["median"] > 0
        assert result["speedups"]["xla_best"]["median"] > 0
    printed = capsys.readouterr().out
    assert op in printed
    lines = [line for line in printed.split("\n\n")[1].splitlines() if line]
    head, _, *rows = ([c.strip() for c in li.strip("|").split("|")] for li in lines)
    for name, *values in zip(head, *rows, strict=True):
        assert any(values), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", *nightly("rowwise")])
def test_fp8_is_compared_with_bf16_and_xla(dtype, tmp_path, capsys):
    asked = ["--dtypes", dtype, "--shapes", "64x128x256", "--devices", "2"]
    ops = command.FP8_OPS if dtype == "fp8" else ["linear_pair"]
    found = run(tmp_path, *asked, "--ops", ",".join(ops))
    variants = {(r["op"], r["variant"]) for r in found["results"]}
    assert variants == {(op, "") for op in ops} | {("linear_pair", "fp8=recipe")}
    peers = {"bf16", "xla_qdq"} | ({"xla_f8"} if dtype != "mxfp8" else set())
    for result in found["results"]:
        assert result["dtype"] == dtype
        assert set(result["speedups"]) == peers
        assert {"plain_gemm", "copy", "peak"} <= set(result["shares"])
    assert "| bf16  " in capsys.readouterr().out


def test_fp8_halves_residuals_and_buffers(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "ring_exchange")
    asked = ("--ops", "all_gather_matmul", "--dtypes", "bf16,fp8", "--devices", "2")
    asked = (*asked, "--shapes", "64x128x256")
    wide, fp8 = (each["memory"] for each in run(tmp_path, *asked)["results"])
    # x [64, 128] and w [128, 256], of two ranks.
    assert wide["residual_bytes"] == 2 * (64 * 128 + 128 * 256) / 2
    num_scales = 2
    assert 0 <= fp8["residual_bytes"] - wide["residual_bytes"] / 2 <= 4 * num_scales
    assert fp8["workspace_bytes"] == wide["workspace_bytes"] / 2 > 0
    assert fp8["avoided_bytes"] == wide["avoided_bytes"] / 2


def test_variants_selects_the_variants_of_the_gemm(tmp_path):
    asked = ("--ops", "gemm", "--dtypes", "f32", "--variants", "tn+add,nn")
    found = run(tmp_path, *asked, "--devices", "1")
    names = {result["variant"] for result in found["results"]}
    assert names == {"tn+add", "nn"}


@pytest.mark.slow
def test_thread_counts_are_compared_with_the_first(tmp_path, capsys):
    before = cpu_engine.load().num_threads()
    asked = ("--ops", "latency,small,dgrad_add", "--dtypes", "f32", "--devices", "2")
    found = run(tmp_path, *asked, "--threads", "1,3,1")
    assert cpu_engine.load().num_threads() == before
    assert found["options"]["threads"] == [1, 3]
    forward = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    assert {(result["op"], result["variant"]) for result in found["results"]} == {
        *(("small", op) for op in forward),
        *(("latency", op) for op in (*forward, "all_reduce")),
        ("dgrad_add", "nt+add"),
    }
    for result in found["results"]:
        times_us = result["times_us"]
        ratio = times_us["jax_ub@3"]["median"] / times_us["jax_ub"]["median"]
        assert result["speedups"]["jax_ub@3"]["median"] == pytest.approx(ratio)
        assert result["speedups"]["xla_best"]["median"] > 0
        if result["op"] == "small":
            assert result["shares"]["plain_gemm"]["median"] > 0
    assert "| jax_ub@3 " in capsys.readouterr().out


@pytest.mark.parametrize("method", ["ring_exchange", "direct"])
def test_slots_of_the_method_are_counted_as_memory(
    method, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JAX_UB_METHOD", method)
    asked = ("--ops", "matmul_reduce_scatter", "--dtypes", "f32", "--devices", "2")
    found = run(tmp_path, *asked)
    has_slots = found["results"][0]["memory"]["workspace_bytes"] > 0
    assert has_slots == (method == "ring_exchange")
    assert found["method"] == method
    assert f'method "{method}", 1 rounds' in capsys.readouterr().out


def test_memory_of_the_engine_is_shown_per_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_UB_METHOD", "ring_exchange")
    asked = ("--ops", "all_gather_matmul", "--dtypes", "f32", "--devices", "2")
    found = run(tmp_path, *asked)["results"][0]
    # On each device, a slot of half of the gathered x, from the only peer.
    x_bytes = found["memory"]["avoided_bytes"]
    assert found["memory"]["workspace_bytes"] == x_bytes
    table = capsys.readouterr().out.partition("per device")[2]
    row = table.strip().splitlines()[2]
    assert row.split("|")[-3].strip() == format_bytes(x_bytes // 2)


def test_an_error_has_no_note_of_jax_about_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("JAX_UB_METHOD", "bulk")
    asked = ("--ops", "all_gather_matmul", "--devices", "2")
    assert main(["bench", "--quick", *asked]) == 2
    error = capsys.readouterr().err.splitlines()
    assert 'JAX_UB_METHOD = "bulk" communicates during a GEMM' in error[0]
    assert error[1:] == [
        "See docs/functions.md#environment-variables in the repository of jax_ub"
    ]


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
def test_a_method_that_does_not_exist_is_rejected(more, monkeypatch, capsys):
    monkeypatch.setenv("JAX_UB_METHOD", "drect")
    assert main(["bench", "--quick", *more]) == 2
    error = capsys.readouterr().err
    assert "bench: JAX_UB_METHOD = 'drect' is not a method. Did you mean" in error


def test_a_run_has_all_peers_and_limits(tmp_path):
    found = run(tmp_path, "--ops", "all_gather_matmul", "--dtypes", "bf16")
    (result,) = [r for r in found["results"] if r["num_ranks"] == 2]
    assert result["memory"]["own_bytes"] < result["memory"]["avoided_bytes"]
    assert {"xla_best", "xla_naive", "xla_ring"} <= set(result["speedups"])
    assert {"plain_gemm", "copy", "peak"} <= set(result["shares"])


def test_an_interrupted_run_prints_and_leaves_its_results(
    tmp_path, capsys, monkeypatch
):
    every = measure.measure

    def interrupted(*arguments):
        yield next(every(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", interrupted)
    path = tmp_path / "found.json"
    asked = "--quick --ops gemm --devices 1 --dtypes f32 --variants nn,tn --json"
    assert main(["bench", *asked.split(), str(path)]) == 130
    assert len(json.loads(path.read_text())["results"]) == 1
    assert "| gemm nn |" in capsys.readouterr().out


def test_a_run_on_gpus_names_them():
    about = report.environment()
    assert "devices" not in report.describe(about, 7)
    about["machine"]["device_kind"] = "NVIDIA H200"
    assert "devices NVIDIA H200; " in report.describe(about, 7)


def test_a_source_tree_that_is_not_installed_can_be_measured(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert report.environment()["versions"]["jax_ub"] == "of a source tree"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "gem"], "'gem' is not known. Did you mean 'gemm'?"),
        (["--dtypes", "f8"], "'f8' is not known"),
        (["--variants", "nm"], "'nm' is not known"),
        (["--devices", "0"], "'0' is not a positive integer"),
        (["--threads", "2,0"], "'0' is not a positive integer"),
        (["--rounds", "many"], "'many' is not a positive integer"),
        (["--shapes", "8x8"], "shape '8x8' is not MxKxN with positive sizes"),
    ],
)
def test_malformed_options_are_rejected(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "9x8x8", "--devices", "2"], "does not divide into 2 ranks"),
        (["--processes", "2,1"], "--processes 1 compares no processes. Give 2 or more"),
        (["--processes", "2", "--devices", "2"], "--devices has no effect with --pro"),
        (
            ["--processes", "2", "--platform", "cuda"],
            "--platform cuda has no effect wi",
        ),
        (["--processes", "2", "--threads", "2"], "--threads has no effect with --pro"),
        (
            ["--platform", "cuda", "--threads", "2"],
            "--platform cuda has no effect with --threads",
        ),
        (["--processes", "2", "--dtypes", "fp8"], "--dtypes fp8 has no effect with -"),
        (["--ops", "fused", "--dtypes", "bf16,fp8"], "none of fused has FP8 operands"),
        (["--ops", "fused", "--variants", "nn"], "--variants are those of the op gemm"),
        (["--ops", "small,latency", "--shapes", "8x8x8"], "--shapes has no effect on"),
        (["--ops", "small", "--dtypes", "bf16,fp8"], "none of small has FP8 operands"),
        (
            ["--quick", "--dtypes", "mxfp8"],
            "all_gather_matmul cannot divide shape 32x48x80 into the blocks of mxfp8",
        ),
        (
            ["--dtypes", "mxfp8", "--shapes", "32x64x96", "--devices", "2"],
            "Take a K that is a multiple of 32, and an N that is a multiple of 64.",
        ),
        (["--ops", "latency", "--devices", "1"], "latency is between ranks. Add 2"),
        (["--ops", "gemm", "--devices", "2,4"], "the op gemm runs on one device. Add"),
        (["--ops", "gemm,latency", "--devices", "2"], "the op gemm runs on one device"),
        (
            ["--variants", "nn", "--devices", "2"],
            "--variants are those of the op gemm,",
        ),
        (["--ops", "gemm,linear_pair", "--dtypes", "fp8"], "none of gemm has FP8 oper"),
        (
            ["--processes", "2", "--ops", "gemm,fused,barrier"],
            "none of gemm,fused is compared over processes. Take some of all_gather_m",
        ),
        (
            ["--processes", "2", "--ops", "barrier", "--dtypes", "f32"],
            "--dtypes has no effect on barrier. Leave it out.",
        ),
        (["--ops", "latency", "--devices", "32"], "16x16x16 does not divide into 32"),
        (["--ops", "small", "--devices", "3"], "512x768x768 does not divide into 3"),
        (
            ["--shapes", "96x96x96", "--devices", "3"],
            "latency has fixed sizes, and 16x16x16 does not divide into 3 ranks. Give "
            "--ops without latency, or leave 3 out of --devices.",
        ),
    ],
)
def test_conflicting_options_are_rejected(arguments, text, capsys):
    assert main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        (["--devices", "2"], {"gemm", "barrier"}),
        (["--devices", "1"], {"latency", "barrier"}),
        (["--dtypes", "fp8"], {*command.OPS} - {*command.FP8_OPS}),
        (["--processes", "2"], set()),
    ],
)
def test_the_default_ops_are_those_that_have_cases(arguments, left_out):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found = command.options(parser.parse_args(arguments))
    every = measure.JOB_OPS if "--processes" in arguments else command.OPS
    assert found.ops == tuple(op for op in every if op not in left_out)


def test_more_devices_than_jax_has_are_rejected():
    assert len(jax.devices()) == 16
    with pytest.raises(
        UnsupportedOverlapError, match="P = 99 needs as many devices, .* Use fewer"
    ):
        devices.start("bench", 99)


@pytest.mark.parametrize("command", ["bench --ops gemm --devices 1", "trace --tp 1"])
def test_sizes_beyond_the_memory_are_rejected(command, capsys):
    name, *options = command.split()
    size = "999999999"
    shape = f"{size}x{size}x{size}"
    if name == "trace":
        options += ["--op", "all_gather_matmul", "--shape", shape]
    else:
        options += ["--shapes", shape]
    assert main([name, *options]) == 2
    text = f"an operand of shape [{size}, {size}] does not fit into this machine's mem"
    assert text in capsys.readouterr().err
