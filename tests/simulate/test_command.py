"""`python -m jax_ub simulate`."""

import json

import pytest

from jax_ub import __main__
from jax_ub._src.tools.simulate import hardware, models
from jax_ub._src.tools.simulate.variants import rows


def test_it_prints_a_line_for_every_layer_and_writes_the_figures(tmp_path, capsys):
    found = tmp_path / "found.json"
    arguments = ["--tp", "8", "--hardware", "h200", "--model", "llama3-70b"]
    assert __main__.main(["simulate", *arguments, "--json", str(found)]) == 0
    text = capsys.readouterr().out
    assert "each GPU: 788 TFLOP/s" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("|")]
    assert [line[1] for line in lines[2:7]] == ["qkv", "proj", "fc1", "fc2", "sum"]
    document = json.loads(found.read_text())
    assert document["hardware"]["name"] == "h200"
    row = document["rows"][0]
    assert (row["layer"], row["knobs"], round(row["plan_us"])) == ("qkv", "a1s2", 391)


def test_variants_stand_beside_the_plain_schedules(tmp_path, capsys):
    found = tmp_path / "found.json"
    arguments = ["--tp", "8", "--hardware", "h100", "--json", str(found)]
    assert __main__.main(["simulate", *arguments]) == 0
    rows = json.loads(found.read_text())["variants"]
    assert [(row["layer"], row["variant"]) for row in rows] == [
        ("qkv", "aggregate"),
        ("proj", "overlap_first_gemm"),
        *[("proj", "one_shot")] * 5,
        ("fc1", "aggregate"),
        ("fc2", "overlap_first_gemm"),
        *[("fc2", "one_shot")] * 5,
    ]
    shown = capsys.readouterr().out.partition("variants, as the engine")[2]
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines[1:]] == [row["layer"] for row in rows]
    once = [row for row in rows if row["layer"] == "proj"][1:]
    assert [row["M"] for row in once] == [8, 32, 128, 512, 2048]
    # One exchange pays for few tokens, and "auto" takes it for fewer than that.
    assert [row["is_auto"] for row in once] == [True] + 4 * [False]
    assert [row["speedup"] > 1 for row in once] == [True, True] + 3 * [False]


def test_variants_are_shown_where_they_do_anything():
    def shown(num_ranks):
        model, machine = models.find("llama3-70b"), hardware.find("h100")
        return {row.variant.value for row in rows(model, 8192, num_ranks, machine)}

    assert shown(1) == set()
    assert shown(2) == {"overlap_first_gemm", "one_shot"}
    assert shown(4) == shown(2) | {"aggregate"}


def test_a_host_takes_its_own_figures(capsys):
    arguments = ["--hardware", "cpu", "--tp", "4", "--gflops", "500", "--copy-gbs", "8"]
    assert __main__.main(["simulate", *arguments]) == 0
    text = capsys.readouterr().out
    assert "a host for all ranks: 0.5 TFLOP/s" in text
    assert "0.008 TB/s of memory" in text


@pytest.mark.parametrize("arguments", [[], ["--hardware", "cpu", "--layer", "fc2"]])
def test_a_picture_is_drawn(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "found.png"
    assert __main__.main(["simulate", *arguments, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "llama-70b"], "model 'llama-70b' is not known. Did you mean"),
        (["--layer", "fc3", "--png", "x.png"], "llama3-70b has no layer 'fc3'"),
        (["--layer", "fc3"], "llama3-70b has no layer 'fc3'"),
        (["--layer", "fc2"], "--layer fc2 is what a picture shows. Add --png."),
        (["--hardware", "cpu", "--gflops", "0"], "--gflops 0 is no rate"),
        (["--hardware", "cpu", "--gflops", "nan"], "--gflops nan is no rate"),
        (["--hardware", "cpu", "--copy-gbs", "inf"], "--copy-gbs inf is no rate"),
        (["--tp", "3"], "llama3-70b with 8192 tokens does not divide into 3 ranks"),
        (["--tp", "0"], "does not divide into 0 ranks"),
        (["--gflops", "100"], "'h100' has its figures. Add --hardware cpu."),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capsys):
    assert __main__.main(["simulate", *arguments]) == 2
    assert text in capsys.readouterr().err
