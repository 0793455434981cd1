"""Tests `python -m jax_ub explain script.py`."""

import json
import os
import re

import pytest
from tools import jax_ub

from jax_ub import __main__

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jax_ub as ub
from jax import P

assert sys.argv[1:] == ["--steps", "2"], sys.argv
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
def layers(x, w, v):
    h = ub.all_gather_matmul(x, w, axis_name="tp", ub_name="up")
    return jax.lax.psum_scatter(h @ v, "tp", scatter_dimension=0, tiled=True)
specs = (P("tp"), P(None, "tp"), P("tp"))
f = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=P("tp")))
for _ in range(2):
    jax.block_until_ready(f(jnp.ones((8, 4)), jnp.ones((4, 8)), jnp.ones((8, 4))))
"""


@pytest.mark.slow
def test_script_is_run_and_explained(tmp_path):
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    options = ["--hardware", "h100", "--json", found]
    done = jax_ub("explain", *options, script, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "train.py: 1 of 2 overlapped" in done.stdout
    call, pair = json.loads(found.read_text())["rows"]
    assert (call["scope"], call["method"]) == ("up", "direct")
    assert call["measured_exposed_s"] > 0
    assert pair["op"] == "dot + reduce-scatter"
    assert pair["reason"] == "XLA's own: could be one ub.matmul_reduce_scatter"
    assert pair["source"] == f"{script}:12"
    assert (call["dtype"], pair["dtype"]) == ("f32", "f32")
    head = done.stdout.splitlines()[1]
    assert "predicted h100" in head
    assert "exposed here" in head
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "module"])
def test_program_that_exits_is_explained_and_its_status_returned(
    kind, tmp_path, monkeypatch
):
    script = tmp_path / "train.py"
    text = SCRIPT.replace('"2"]', '"2", "--json", "x"]')
    script.write_text(f"{text}\nsys.exit(3)")
    program = (script,) if kind == "script" else ("-m", "train")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = jax_ub("explain", *program, "--steps", "2", "--json", "x")
    assert done.returncode == 3, done.stderr
    assert "explain: note: the script gets --json. Options of explain" in done.stderr
    name = "train.py" if kind == "script" else "train"
    assert f"{name}: 1 of 2 overlapped" in done.stdout


@pytest.mark.slow
def test_missing_program_dumps_are_an_error(tmp_path):
    script = tmp_path / "train.py"
    flags = "import os\nos.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=false'\n"
    script.write_text(flags + SCRIPT)
    done = jax_ub("explain", script, "--steps", "2")
    assert done.returncode == 2
    assert "no linears" not in done.stdout
    assert re.search(r"XLA wrote none of the \d+ programs", done.stderr)
    assert "is now '--xla_cpu_enable_fast_math=false'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--",)])
def test_arguments_of_the_script_are_passed_unchanged(tmp_path, options):
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = jax_ub("explain", *options, script, "--", "--json", "x")
    assert done.returncode == 0, done.stderr
    assert "['--', '--json', 'x']" in done.stdout


def test_unknown_hardware_is_an_error_before_the_script_runs(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["explain", "--hardware", "h10", str(script)])
    assert "--hardware: 'h10' is not known. Did you mean" in capsys.readouterr().err


def test_missing_script_is_an_error(capsys):
    assert __main__.main(["explain", "missing.py"]) == 2
    assert "explain: there is no script 'missing.py'" in capsys.readouterr().err
