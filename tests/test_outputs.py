import argparse

import pytest

from jax_ub import __main__
from jax_ub.outputs import output_path


def test_a_file_in_a_folder_that_exists_may_be_written(tmp_path):
    assert output_path(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert output_path("new.json").name == "new.json"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder. Name a file"):
        output_path(str(tmp_path))


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
