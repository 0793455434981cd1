"""Tests what all commands share: parsers of options, `--json`, colors, progress."""

import argparse
import io
import json
import math
import os
import sys

import pytest

from jax_ub import __main__
from jax_ub._src.tools import command_line, doctor
from jax_ub._src.tools.command_line import (
    Shape,
    amount_of,
    list_of,
    name_of,
    names_of,
    output_path,
    parse_shape,
    positive,
    replaced_path,
    seconds,
)
from jax_ub._src.tools.doctor import Finding, State
from jax_ub._src.tools.simulate import picture_path
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def parse(*arguments):
    parser = argparse.ArgumentParser()
    command_line.add_json(parser, "all")
    return parser.parse_args(arguments)


@pytest.mark.parametrize("package", ["matplotlib", "psutil"])
def test_missing_package_is_an_error_that_names_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnsupportedOverlapError,
        match=rf"bench requires {package}, .* pip install 'jax_ub\[bench\]'",
    ):
        command_line.load_extra(package, "bench")


def test_names_are_parsed_and_unknown_ones_suggest_the_nearest():
    assert name_of({"f32": 4, "bf16": 2})("bf16") == "bf16"
    assert names_of(("f32", "bf16"))("bf16,f32") == ("bf16", "f32")
    for parse in (name_of(("f32", "bf16")), names_of(("f32", "bf16"))):
        with pytest.raises(argparse.ArgumentTypeError, match="'f33' is not known. Did"):
            parse("f33")


def test_file_in_an_existing_folder_is_accepted(tmp_path):
    assert output_path(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert output_path("new.json").name == "new.json"


def test_folder_is_rejected_as_output_file(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder. Name a file"):
        output_path(str(tmp_path))


def test_a_pipe_is_rejected_as_a_file_to_replace(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert output_path(str(tmp_path / "pipe")) == tmp_path / "pipe"
    with pytest.raises(argparse.ArgumentTypeError, match="is not a regular file. Name"):
        replaced_path(str(tmp_path / "pipe"))
    (tmp_path / "old.json").touch()
    for name in ("old.json", "new.json"):
        assert replaced_path(str(tmp_path / name)) == tmp_path / name


@pytest.mark.parametrize("name", ["old.json", "new.json"])
def test_file_without_write_permission_is_rejected(name, tmp_path, monkeypatch):
    (tmp_path / "old.json").touch()
    asked = []
    # Root has all permissions.
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    with pytest.raises(argparse.ArgumentTypeError, match=f"{name}' is not writable"):
        output_path(str(tmp_path / name))
    assert asked == [tmp_path / name if name == "old.json" else tmp_path]


@pytest.mark.parametrize("name", ["found", "found.xyz"])
def test_suffix_of_an_image_selects_its_format(name, tmp_path):
    assert picture_path(str(tmp_path / "found.svg")).name == "found.svg"
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"does not end in .png, .pdf, .svg"
    ):
        picture_path(str(tmp_path / name))


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--json"),
        ("explain", "--json"),
        ("simulate", "--json"),
        ("simulate", "--plot"),
        ("trace", "--json"),
        ("tune", "--output"),
    ],
    ids=" ".join,
)
def test_missing_folder_is_rejected_before_the_command_runs(command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        __main__.main([*command, str(tmp_path / "none" / "file")])
    assert "there is no folder" in capsys.readouterr().err


def test_a_value_of_a_list_counts_once():
    assert list_of(positive)("2,3,02") == (2, 3)


def test_a_shape_is_parsed_from_its_text():
    assert parse_shape(str(Shape(512, 1024, 2816))) == Shape(512, 1024, 2816)


@pytest.mark.parametrize("text", ["3x4", "", "axbxc", "8x0x8", "8x8x8x8", "-8x8x8"])
def test_malformed_shapes_are_rejected(text):
    with pytest.raises(ShapeContractError, match="is not MxKxN with positive sizes"):
        parse_shape(text)


def test_flops_and_bytes_of_a_gemm():
    shape = Shape(2, 3, 5)
    assert shape.flops == 60
    assert shape.bytes("float32") == 4 * (2 * 3 + 3 * 5 + 2 * 5)


def test_the_row_linear_swaps_the_features_of_the_column_linear():
    assert Shape(2, 3, 5).row == Shape(2, 5, 3)


def test_a_number_of_a_unit_is_parsed():
    assert amount_of("GB/s")("1e3") == 1000
    for text in ("0", "-1", "nan", "inf", "1e400", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number of GB/s"):
            amount_of("GB/s")(text)


def test_a_time_is_parsed():
    assert [seconds(text) for text in ("0", "1.5", "inf")] == [0, 1.5, math.inf]
    for text in ("-1", "nan", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds"):
            seconds(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "²", "\u0660", "0" * 5000])
def test_a_number_that_is_no_positive_integer_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive integer"):
        positive(text)


@pytest.mark.parametrize("text", [str(2**40 + 1), "9" * 20, "9" * 5000])
def test_a_number_beyond_all_sizes_is_called_too_large(text):
    assert positive("00012") == 12
    assert positive(str(2**40)) == 2**40
    with pytest.raises(argparse.ArgumentTypeError, match=r"too large. Give at most 2"):
        positive(text)


@pytest.mark.parametrize("text", ["1e-300", "1e-4", "2e9", "1e300"])
def test_an_amount_out_of_range_is_rejected(text):
    assert [amount_of("GB/s")(each) for each in ("0.001", "1e9")] == [1e-3, 1e9]
    with pytest.raises(
        argparse.ArgumentTypeError,
        match=r"GB/s is out of range. Give a number from 0.001 to 1e\+09",
    ):
        amount_of("GB/s")(text)


@pytest.mark.parametrize(
    ("command", "option"), [("simulate", "plot"), ("tune", "output")]
)
def test_json_and_another_output_are_two_files(command, option, tmp_path, capsys):
    (tmp_path / "same").symlink_to(tmp_path)
    paths = tmp_path / "found.png", tmp_path / "same" / "found.png"
    files = [f"--{option}={paths[0]}", f"--json={paths[1]}"]
    assert __main__.main([command, *files]) == 2
    error = capsys.readouterr().err
    assert f"--json and --{option} both name" in error
    assert "Name two files." in error
    assert not paths[0].exists()


def test_text_is_printed_and_the_document_written(tmp_path, capsys):
    given = parse("--json", str(tmp_path / "found.json"))
    command_line.say(given, "a table")
    command_line.write(given, {"a": 1}, is_complete=False)
    assert json.loads((tmp_path / "found.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize("option", [["--json"], ["--json", "-"], ["--json=-"]])
def test_only_the_complete_document_is_printed(option, capsys):
    given = parse(*option)
    command_line.say(given, "a table")
    command_line.write(given, {"a": 0}, is_complete=False)
    with command_line.program_stdout(given):
        sys.stdout.write("of a program\n")
    command_line.write(given, {"a": 1})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1}
    assert printed.err == "of a program\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--json"],
        ["simulate", "--json"],
        ["trace", "--json", "-", "--op", "all_gather_matmul", "--repeats", "1"],
        ["explain", "--json", "-"],
        ["tune", "--json", "--shapes", "32x48x80", "--rounds", "1", "--output"],
        pytest.param(
            ["bench", "--json", "--quick", "--ops", "gemm", "--rounds", "1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_stdout_has_nothing_but_json(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("print('of a program')")
    needs = {"explain": [str(script)], "tune": [str(tmp_path / "tuned.json")]}
    assert __main__.main([*arguments, *needs.get(arguments[0], [])]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("stdout", "environment", "is_colored"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_a_terminal_gets_colors_unless_the_user_wants_none(
    stdout, environment, is_colored, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout())
    findings = [Finding("a", State.OK, "b"), Finding("c", State.FAULT, "d")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert __main__.main(["doctor"]) == 1
    plain = "   ok  a  b\nFAULT  c  d\n"
    colored = "   \033[32mok\033[0m  a  b\n\033[31mFAULT\033[0m  c  d\n"
    assert sys.stdout.getvalue() == (colored if is_colored else plain)


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_progress_is_shown_on_a_terminal_only(stderr, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr())
    assert list(command_line.progress("tune", "ab")) == ["a", "b"]
    shown = [f"\r\033[K{text}\r" for text in ("tune: 1 of 2", "tune: 2 of 2", "")]
    assert sys.stderr.getvalue() == ("".join(shown) if stderr is Terminal else "")


def test_a_script_may_change_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.chdir('there'); print('found', os.path.exists(__file__))"
    )
    assert __main__.main(["trace", "--json", "found.json", "script.py"]) == 0
    assert "found True" in capsys.readouterr().out  # as with python script.py
    assert json.loads((tmp_path / "found.json").read_text())["jax_ub"]["calls"] == []
