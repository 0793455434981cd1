import argparse
import os
import pathlib

import pytest

from jax_ub import __main__
from jax_ub._src.files import OutputError, output_path, picture_path, write_json


def test_a_file_in_a_folder_that_exists_may_be_written(tmp_path):
    assert output_path(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert output_path("new.json").name == "new.json"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder. Name a file"):
        output_path(str(tmp_path))


@pytest.mark.parametrize("name", ["old.json", "new.json"])
def test_what_may_not_be_written_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "old.json").touch()
    asked = []
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    with pytest.raises(argparse.ArgumentTypeError, match=f"{name}' may not be written"):
        output_path(str(tmp_path / name))
    assert asked == [tmp_path / name if name == "old.json" else tmp_path]


@pytest.mark.parametrize("name", ["found", "found.xyz"])
def test_a_picture_has_an_ending_that_says_which_kind(name, tmp_path):
    assert picture_path(str(tmp_path / "found.svg")).name == "found.svg"
    with pytest.raises(argparse.ArgumentTypeError, match=r"none of .png, .pdf, .svg"):
        picture_path(str(tmp_path / name))


def test_a_full_disk_is_named():
    with pytest.raises(OutputError, match="cannot write '/dev/full': No space left"):
        write_json(pathlib.Path("/dev/full"), {})


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--json"),
        ("bench", "--plot"),
        ("explain", "--json"),
        ("simulate", "--json"),
        ("simulate", "--png"),
        ("trace", "--json"),
        ("trace", "--png"),
        ("tune", "--output"),
    ],
    ids=" ".join,
)
def test_a_missing_folder_is_refused_before_anything_runs(command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        __main__.main([*command, str(tmp_path / "none" / "file")])
    assert "there is no folder" in capsys.readouterr().err
