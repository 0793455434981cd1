"""The texts of errors about invalid commands, files and settings."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jax_ub as ub
from jax_ub import __main__
from jax_ub._src.runtime import settings, tuned_file
from jax_ub._src.tools.launch.parts import MOST
from jax_ub.errors import (
    ConfigurationError,
    InputError,
    ShapeContractError,
    UnknownNameError,
)
from jax_ub.flax import linen


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--processes", "1000000"],
        ["launch", "--processes", "1000000", __file__],
        ["launch", "--devices-per-process", "9" * 12, __file__],
        ["trace", "--processes", "1000000", __file__],
        ["bench", "--devices", "1000000"],
    ],
)
def test_more_than_a_machine_can_run_is_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(arguments)
    option, value = arguments[1:3]
    text = f"{option}: '{value}' is more than one machine can run. Give at most {MOST}."
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "trace"])
@pytest.mark.parametrize("source", [b"print(1)\0", b"def", b"\xff\xfe"])
def test_a_script_that_is_no_python_is_rejected(command, source, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_bytes(source)
    assert __main__.main([command, str(script)]) == 2
    assert f"'{script}' cannot be run: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "trace"])
def test_a_script_that_cannot_be_read_is_rejected(command, capsys):
    assert __main__.main([command, "/proc/self/mem"]) == 2
    text = "'/proc/self/mem' cannot be run: [Errno 5] Input/output error. Give a Python"
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_ends_a_report_with_the_reason():
    program = (
        "import sys; from jax_ub import __main__;"
        "from jax_ub._src.tools import doctor;"
        "doctor.command = lambda given: print('x' * 100_000) or 0;"
        "sys.exit(__main__.main(['doctor']))"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE
        )
    assert ended.stderr == b"cannot write to stdout: No space left on device\n"
    assert ended.returncode == 1


def test_an_output_whose_name_is_too_long_is_rejected(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["simulate", "--json", "x" * 5000])
    assert "is not a file name: File name too long." in capsys.readouterr().err


def test_more_threads_than_a_machine_can_run_are_rejected(monkeypatch):
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "100000000000000000000")
    text = "JAX_UB_NUM_THREADS = 100000000000000000000 is too large"
    with pytest.raises(ConfigurationError, match=text):
        settings.check()


@pytest.mark.parametrize("versions", [[1, 2], 3, {"jax": 1}, None])
def test_a_tuned_file_with_other_versions_is_rejected(versions, tmp_path):
    path = tmp_path / "tuned.json"
    kernel_options = {"device": "x", "versions": versions, "entries": []}
    path.write_text(json.dumps({"schema": 1, "tunings": [kernel_options]}))
    with pytest.raises(ConfigurationError, match="tuned file .* Write it"):
        tuned_file.read(path)


def test_a_tuned_file_of_nested_lists_is_rejected(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="tuned file .*recursion"):
        tuned_file.read(path)


@pytest.mark.parametrize("text", ["a: " + "[" * 9000, "a: 2020-99-99", "a: {b: ["])
def test_text_that_is_no_yaml_is_rejected(text):
    with pytest.raises(
        ConfigurationError, match="(?s)the source is not YAML: .* Pass a"
    ):
        ub.overlap_config.from_te(f"x:\n  {text}")


@pytest.mark.parametrize("axis_name", [1, [b"tp"], {}])
def test_an_axis_that_is_no_name_is_rejected(axis_name):
    for function in (ub.destroy_ub, ub.is_ub_initialized):
        text = f"{function.__name__}: axis_name = .* is not the name of a mesh axis"
        with pytest.raises(ShapeContractError, match=text):
            function(axis_name)


def test_a_backend_that_is_no_string_is_rejected():
    text = "bootstrap_backend = 1 is unknown. Known: 'jax', 'mpi'"
    with pytest.raises(UnknownNameError, match=text):
        ub.initialize_ub((8, 8), 1, bootstrap_backend=1)


def test_a_trace_that_is_no_file_is_rejected(tmp_path):
    with pytest.raises(ShapeContractError, match="trace: path = 1 is of type int"):
        ub.trace(1).__enter__()
    with pytest.raises(ShapeContractError, match="events_per_thread = 0 is not a num"):
        ub.trace(events_per_thread=0).__enter__()
    with pytest.raises(ShapeContractError, match="explain: trace = 1 is not a trace."):
        ub.explain(lambda: None, trace=1)
    with pytest.raises(InputError, match="cannot read '.*': No such .*Give the files"):
        ub.explain(lambda: None, trace=os.fspath(tmp_path / "missing.json"))


def test_rules_that_are_no_dictionary_are_rejected():
    with pytest.raises(UnknownNameError, match="overlap: rules = 1 is not a dict"):
        linen.Overlap(1)


@pytest.mark.parametrize("numbers", [None, ((), ()), (((1,), (0, 1)), ((), ())), "ab"])
def test_dimension_numbers_of_another_form_are_rejected(numbers):
    text = "dimension_numbers = .* are not those of jax.lax.dot_general. Pass"
    x = jnp.zeros((8, 8))
    with pytest.raises(ShapeContractError, match=text):
        ub.dot_general("column")(x, x, numbers)
