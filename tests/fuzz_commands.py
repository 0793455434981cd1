"""Targets of the fuzz test: commands, files and environment variables."""

import contextlib
import io
import json
import os
import pathlib
import tempfile
import unittest.mock

from bad_values import Target
from fuzz_targets import NUM_RANKS, PER_DEVICE, mesh

import jax_ub as ub
from jax_ub import __main__
from jax_ub._src.runtime import settings, tuned_file

# Texts for command lines, environment variables and files.
TEXTS = {
    text: (lambda text=text: text)
    for text in (
        *(
            "",
            "-1",
            "0",
            "1",
            "1.5",
            "1e400",
            "nan",
            "inf",
            "1e-320",
            "x",
            "tp,tp",
            ",",
        ),
        *(
            "99999999999999999999",
            "1000000",
            "4097",
            "9" * 5000,
            "0x10",
            "1,2",
            "1x1x1",
        ),
        *("\u00b2", "\u0661", "\ud800", "-n", "/", "/proc/self/mem", "/dev/null"),
        *("all", "none", "None", "xla", "x" * 10_000, "a/b", "{}", "[[", "\n", "%s"),
    )
}
_OPTIONS = {
    "simulate": {"--tp": "2", "--model": "llama3-8b", "--tokens": "256"},
    "trace": {"--merge": "missing.json"},
    "explain": {"--hardware": "cpu", "program": "missing.py"},
    "launch": {"-n": "1", "program": "missing.py"},
    "doctor": {"--processes": "1", "--devices-per-process": "1"},
    "bench": {"--ops": "missing"},
    "tune": {"--output": "/missing/file"},
}
_MORE = {
    "simulate": ("--hardware", "--gflops", "--copy-gbs", "--fp8", "--json", "--plot"),
    "trace": (
        *("--op", "--method", "--tp", "--shape", "--dtype", "--repeats"),
        *("--processes", "--devices-per-process", "--json", "program"),
    ),
    "explain": ("--json",),
    "launch": ("--devices-per-process", "--hosts", "--timeout", "--linger", "--grace"),
    "bench": (
        *("--devices", "--dtypes", "--shapes", "--variants", "--threads", "--rounds"),
    ),
    "tune": ("--tp", "--dtypes", "--shapes", "--model", "--tokens", "--rounds"),
}


def _command(name):
    """A command that exits before it measures, since a required option is missing."""

    def run(arguments):
        given = arguments()
        program = [given.pop("program")] if "program" in given else []
        words = [
            f"{option}={value}" for option, value in given.items() if len(option) > 2
        ]
        words += [w for o, v in given.items() if len(o) == 2 for w in (o, v)]
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            unittest.mock.patch(
                "jax_ub._src.tools.launch.job._supervise", return_value=0
            ),
        ):
            try:
                status = __main__.main([name, *words, *program])
            except SystemExit as end:
                status = end.code
        text = err.getvalue()
        assert status in (0, 1, 2), status
        assert status == 0 or text or out.getvalue()
        assert "Traceback" not in text

    # Commands that start processes or measure are tried with invalid options only.
    fixed = ("--output",) if name == "tune" else ("--ops",) if name == "bench" else ()
    return Target(
        lambda: dict(_OPTIONS[name]), run, _MORE.get(name, ()), TEXTS, fixed=fixed
    )


COMMANDS = {f"command {name}": _command(name) for name in _OPTIONS if name != "doctor"}


def _tuned_file():
    environment = tuned_file.environment()
    case = {"op": "all_gather_matmul", "num_ranks": 4, "M": 8, "K": 8, "N": 8}
    entry = {**case, "dtype": "float32", "method": "direct", "num_splits": 0}
    entry |= {"tuning": {"num_sm": 1, "variant": "plain"}, "times_us": {"direct": 1.0}}
    made = {"device": environment.device, "versions": dict(environment.versions)}
    return {"schema": 1, "tunings": [{**made, "entries": [entry]}]}


def _with_tuned_file(arguments):
    """Initializes with a file of tuned choices and traces a call that looks them up."""
    try:
        text = json.dumps(arguments()["document"])
    except (TypeError, ValueError, RecursionError):
        return  # not a JSON document
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tuned.json")
        path.write_text(text)
        ub.initialize_ub((64, 64), NUM_RANKS, mesh=mesh(), ub_cfgs=path)
        try:
            PER_DEVICE["all_gather_matmul"].run(PER_DEVICE["all_gather_matmul"].valid)
        finally:
            ub.destroy_ub()


def _yaml(text):
    ub.overlap_config.from_te(f"qkv_fprop:\n  method: {text}\n{text}")


def _with_variables(arguments):
    """Initializes and traces a call with environment variables."""
    given = {k: v for k, v in arguments().items() if "\ud800" not in str(v)}
    with unittest.mock.patch.dict(os.environ, given):
        settings.check()
        PER_DEVICE["linear"].run(PER_DEVICE["linear"].valid)
        ub.initialize_ub((64, 64), NUM_RANKS, mesh=mesh())
        ub.destroy_ub()


FILES = {
    "a tuned file": Target(lambda: {"document": _tuned_file()}, _with_tuned_file),
    "YAML": Target(
        lambda: {"text": "pipeline"},
        lambda arguments: (
            _yaml(**arguments()) if arguments()["text"] != "pipeline" else 0
        ),
        values={**TEXTS, **{k: (lambda k=k: k) for k in ("[" * 9000, "{a: " * 3000)}},
    ),
    "JAX_UB_": Target(
        dict,
        _with_variables,
        [name for name in settings.NAMES if not name.endswith("_DIR")],
        TEXTS,
    ),
}
