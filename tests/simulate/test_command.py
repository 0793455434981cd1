"""`python -m jax_ub simulate`."""

import dataclasses
import json
import pathlib
import re

import pytest

from jax_ub import __main__
from jax_ub._src.prediction.hardware import HARDWARE
from jax_ub._src.tools.models import MODELS, Layer
from jax_ub._src.tools.simulate import fp8_row, layer_row
from jax_ub.errors import UnsupportedOverlapError

QKV = Layer("qkv", "all_gather_matmul", 8192, 10240)


def test_each_layer_has_a_row_in_the_table_and_the_json(tmp_path, capsys):
    found = tmp_path / "found.json"
    arguments = ["--tp", "8", "--hardware", "h200", "--model", "llama3-70b"]
    assert __main__.main(["simulate", *arguments, "--json", str(found)]) == 0
    text = capsys.readouterr().out
    assert "each GPU: 788 TFLOP/s" in text
    assert "collective 15 us; 4 multiprocessors are kept free\n" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("|")]
    assert [line[1] for line in lines[2:7]] == ["qkv", "proj", "fc1", "fc2", "sum"]
    document = json.loads(found.read_text())
    assert document["hardware"]["name"] == "h200"
    row = document["rows"][0]
    assert (row["layer"], row["method"]) == ("qkv", "pipeline")
    assert round(row["plan_us"]) == 442


def test_few_tokens_are_left_to_xla_as_auto_does(tmp_path):
    found = tmp_path / "found.json"
    assert __main__.main(["simulate", "--tokens", "64", "--json", str(found)]) == 0
    for row in json.loads(found.read_text())["rows"]:
        assert row["method"] == "xla"
        if row["op"] == "all_gather_matmul":
            assert (row["speedup"], row["hidden"]) == (1, 0)
        else:  # jax_ub's plain JAX sends partial sums in f32, the peer in bf16
            assert row["speedup"] < 1


def test_a_host_takes_measured_rates(capsys):
    arguments = ["--hardware", "cpu", "--tp", "4", "--gflops", "500", "--copy-gbs", "8"]
    assert __main__.main(["simulate", *arguments]) == 0
    text = capsys.readouterr().out
    assert "a host for all ranks: 500 GFLOP/s" in text
    assert "8 GB/s of memory" in text
    assert "multiprocessors" not in text


def test_each_time_has_a_unit_that_fits(tmp_path, capsys):
    found = tmp_path / "found.json"
    assert __main__.main(["simulate", "--hardware", "cpu", "--json", str(found)]) == 0
    text = capsys.readouterr().out
    head, *rows = [line.split("|")[1:-1] for line in text.splitlines() if "|" in line]
    first, total = (
        dict(zip(map(str.strip, head), map(str.strip, row), strict=True))
        for row in (rows[1], rows[-1])
    )
    rows = json.loads(found.read_text())["rows"]
    total_us = sum(row["plan_us"] for row in rows)
    assert total["plan"] == f"{total_us / 1e6:.3g} s"
    assert first["wire"] == f"{rows[0]['wire_us'] / 1e3:.3g} ms"


def fp8_rows_of(tmp_path, *arguments):
    found = tmp_path / "found.json"
    command = ["simulate", "--fp8", "--json", str(found), *arguments]
    assert __main__.main(command) == 0
    return {row["layer"]: row for row in json.loads(found.read_text())["fp8"]}


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_fp8_gains_where_the_gemm_or_the_gather_is_long(gpu, tmp_path, capsys):
    rows = fp8_rows_of(tmp_path, "--hardware", gpu)
    assert all(rows[name]["gain"] > 1.7 for name in ("qkv", "fc1"))
    # Partial sums stay bf16, so a layer that they bound gains nothing.
    assert 0.95 < rows["proj"]["gain"] < 1.1
    assert 1.4 < rows["sum"]["gain"] < 1.7
    layers = [row for name, row in rows.items() if name != "sum"]
    total = sum(row["bf16_us"] for row in layers) / sum(row["fp8_us"] for row in layers)
    assert rows["sum"]["gain"] == pytest.approx(total)
    text = capsys.readouterr().out
    assert "| layer | bf16 | fp8 | gain | wire | wire dtype |" in " ".join(text.split())
    for row in layers:
        pays = row["wire_us"] < row["bf16_us"]
        assert row["wire_dtype"] == ("pays" if pays else "costs")
    assert rows["fc1"]["wire_dtype"] == "costs"


def test_a_slow_wire_makes_wire_dtype_pay():
    slow = dataclasses.replace(HARDWARE["h100"], wire_bytes_per_s=25e9)
    found, fast = (fp8_row(QKV, 8192, 8, m) for m in (slow, HARDWARE["h100"]))
    assert found["wire_us"] < found["bf16_us"]
    assert fast["wire_us"] > fast["bf16_us"]
    found = fp8_row(QKV, 8192, 1, slow)
    assert found["wire_us"] == found["bf16_us"]


def test_fp8_gains_nothing_on_a_host_and_is_rejected_on_an_a100(tmp_path):
    rows = fp8_rows_of(tmp_path, "--hardware", "cpu", "--tp", "2")
    assert 0.95 < rows["sum"]["gain"] <= 1
    with pytest.raises(UnsupportedOverlapError, match="a100 has no FP8 GEMM. Use anot"):
        fp8_row(QKV, 8192, 8, HARDWARE["a100"])


def test_the_guide_has_the_predicted_gains():
    guide = pathlib.Path(__file__).parents[2] / "docs/gain.md"
    rows = re.findall(
        r"^\| (\S+) \| (\w+) \| (.*) \|$", guide.read_text(), re.MULTILINE
    )
    gains = {(model, gpu): found for model, gpu, found in rows if gpu in HARDWARE}
    gpus = [name for name, machine in HARDWARE.items() if not machine.is_host]
    assert list(gains) == [(model, gpu) for model in MODELS for gpu in gpus]
    for (model, gpu), found in gains.items():
        predicted = []
        for num_ranks in (2, 4, 8):
            sizes = 8192, num_ranks, HARDWARE[gpu]
            rows = [layer_row(layer, *sizes) for layer in MODELS[model]]
            serial_us = sum(row["serial_us"] for row in rows)
            gain = serial_us / sum(row["plan_us"] for row in rows)
            predicted.append(f"{gain:.2f}")
        assert found == " | ".join(predicted), (model, gpu)


@pytest.mark.parametrize("arguments", [[], ["--hardware", "cpu", "--tp", "2"]])
def test_the_picture_is_a_png(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "found.png"
    assert __main__.main(["simulate", *arguments, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tp", "3"], "with --tokens 8192 does not divide into --tp 3 ranks"),
        (
            ["--tp", "1", "--tokens", "1", "--plot", "x.png"],
            "1 divides into none of th",
        ),
        (["--tp", "32"], "--tp 32 on 'h100': the CUDA engine overlaps at most 16 ran"),
        (["--gflops", "100"], "'h100' has its figures. Add --hardware cpu."),
    ],
)
def test_invalid_arguments_are_rejected(arguments, text, capsys):
    assert __main__.main(["simulate", *arguments]) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert printed.endswith("\nSee docs/simulate.md in the repository of jax_ub\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "llama-70b"], "--model: 'llama-70b' is not known. Did you mean"),
        (["--hardware", "h1000"], "--hardware: 'h1000' is not known. Did you mean"),
        (["--gflops", "0"], "--gflops: '0' is not a number of GFLOP/s. Give a positiv"),
        (["--gflops", "nan"], "--gflops: 'nan' is not a number of GFLOP/s."),
        (["--copy-gbs", "inf"], "--copy-gbs: 'inf' is not a number of GB/s."),
        (["--tp", "x"], "--tp: 'x' is not a positive integer. Give a number, such as"),
        (["--tokens", "0"], "--tokens: '0' is not a positive integer."),
    ],
)
def test_malformed_options_are_rejected(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["simulate", *arguments])
    assert text in capsys.readouterr().err
