"""Tests the parsers of command-line options."""

import argparse
import math
import os
import sys

import pytest

from jax_ub import __main__
from jax_ub._src.tools import options
from jax_ub._src.tools.options import (
    Shape,
    amount_of,
    name_of,
    names_of,
    output_path,
    parse_shape,
    positive,
    replaced_path,
    seconds,
)
from jax_ub._src.tools.simulate import picture_path
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError


@pytest.mark.parametrize("package", ["matplotlib", "psutil"])
def test_missing_package_is_an_error_that_names_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnsupportedOverlapError,
        match=rf"bench requires {package}, .* pip install 'jax_ub\[bench\]'",
    ):
        options.load_extra(package, "bench")


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


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "²", "9" * 5000])
def test_a_number_that_is_no_positive_integer_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive integer"):
        positive(text)
