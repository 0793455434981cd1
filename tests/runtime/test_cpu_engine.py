"""The engine is checked at import, registered once, and configured by variables."""

import importlib.machinery
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest
from jax.export import DisabledSafetyCheck

import jax_ub
from jax_ub._src.primitives.collectives import export_safety_checks
from jax_ub._src.runtime import cpu_engine, cuda_engine
from jax_ub.errors import ConfigurationError


def run_python(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )


def test_an_engine_of_this_ffi_version_is_accepted():
    built = tuple(cpu_engine.load().xla_ffi_api_version)
    cpu_engine.check_ffi_api(built, cpu_engine.running_ffi_api(), jax.__version__)
    cpu_engine.check_ffi_api((0, 1), (0, 3), "0.10.2")


@pytest.mark.parametrize("built", [(0, 4), (1, 0)])
def test_an_engine_of_a_newer_ffi_version_is_rejected(built):
    message = r"built for XLA FFI API .*but jax 0.10.2 has 0.3.*pip install -U jax"
    with pytest.raises(ImportError, match=message):
        cpu_engine.check_ffi_api(built, (0, 3), "0.10.2")


@pytest.mark.slow
def test_a_missing_engine_is_an_error_that_explains_how_to_build_it():
    hidden = (
        "import sys; sys.modules['jax_ub._cpu'] = None\n"
        "import jax.numpy as jnp, jax_ub as ub\n"
        "ub.linear(jnp.ones((2, 4)), jnp.ones((4, 4)))"
    )
    done = run_python(hidden)
    assert done.returncode != 0
    assert "ImportError: jax_ub: its compiled engine jax_ub._cpu is missing." in (
        done.stderr
    )
    # An editable install has the engine in another folder than the sources.
    assert re.search(r"pip install (-e )?\.", done.stderr)


def test_sources_that_hide_the_installed_engine_are_named(tmp_path, monkeypatch):
    (tmp_path / "jax_ub").mkdir()
    (tmp_path / "jax_ub" / "_cpu.abi3.so").touch()
    installed = types.SimpleNamespace(locate_file=lambda name: tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setattr(cpu_engine, "why_not", lambda: None)
    monkeypatch.setitem(sys.modules, "jax_ub._cpu", None)
    sources = pathlib.Path(cpu_engine.__file__).parents[3]
    message = f"the sources in {sources}, which hide the package in {tmp_path}. "
    with pytest.raises(ImportError, match=f"{message}.* -P; .* pip install -e ."):
        cpu_engine.load.__wrapped__()


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_an_engine_that_the_linker_rejects_is_named_with_a_fix(
    name, tmp_path, monkeypatch
):
    # A file that is no library, like an engine of another Python or glibc, fails in
    # `dlopen`. The folder hides the engine of this environment, which the finder of an
    # editable install would find in any case.
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"{name}{suffix}").write_bytes(b"no library")
    monkeypatch.setattr(jax_ub, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    monkeypatch.delitem(sys.modules, f"jax_ub.{name}", raising=False)
    monkeypatch.setattr(cpu_engine, "why_not", lambda: None)
    version = "{}.{}".format(*sys.version_info)
    message = (
        f"jax_ub: Python {version} cannot load its engine jax_ub.{name}, which may "
        rf"have been built for another Python or system: .*{name}.*\. .*pip install "
    )
    load = {"_cpu": cpu_engine.load, "_cuda": cuda_engine.load}[name]
    with pytest.raises(ImportError, match=message):
        load.__wrapped__()


@pytest.mark.slow
def test_importing_an_incompatible_engine_leaves_jax_usable():
    program = (
        "import sys, types\n"
        "sys.modules['jax_ub._cpu'] = cpu = types.ModuleType('_cpu')\n"
        "cpu.xla_ffi_api_version = (0, 99)\n"
        "try:\n"
        "    import jax_ub\n"
        "except ImportError as error:\n"
        "    assert '0.99' in str(error), error\n"
        "import jax\n"
        "print(jax.numpy.ones(3).sum())\n"
    )
    done = run_python(program)
    assert done.stdout == "3.0\n", done.stderr


@pytest.mark.slow
def test_variables_reach_the_engine():
    program = (
        "import jax, jax_ub as ub\n"
        "from jax_ub import _cpu\n"
        "ub.linear(jax.numpy.ones((2, 2)), jax.numpy.ones((2, 2)))\n"
        "print(_cpu.num_threads(), _cpu.isa())\n"
    )
    done = run_python(program, JAX_UB_NUM_THREADS="3", JAX_UB_ISA="portable")
    assert done.stdout == "3 portable\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "found"),
    [
        (
            "from jax_ub._src.tools.bench.report import environment\n"
            "print(environment()['engine'])",
            "{'isa': 'portable', 'threads': 3}",
        ),
        (
            "from jax_ub._src.runtime.tuned_file import environment\n"
            "print(environment())",
            "cpu portable, ",
        ),
        (
            "from jax_ub._src.tools.doctor import examine\n"
            "print(next(f.text for f in examine() if f.name == 'engine threads'))",
            "3 compute, ",
        ),
    ],
    ids=["bench", "tuned tables", "doctor"],
)
def test_the_variables_apply_to_reports_before_the_first_call(program, found):
    done = run_python(program, JAX_UB_NUM_THREADS="3", JAX_UB_ISA="portable")
    assert found in done.stdout, (done.stdout, done.stderr)


def test_an_unavailable_instruction_set_is_rejected(monkeypatch):
    monkeypatch.setenv("JAX_UB_ISA", "portble")
    with pytest.raises(ConfigurationError, match="JAX_UB_ISA = .* mean 'portable'"):
        cpu_engine.check_isa()


def test_registration_happens_once():
    cpu_engine.register_targets()
    cpu_engine.register_targets()
    assert cpu_engine.register_targets.cache_info().misses == 1


@pytest.mark.parametrize("platforms", ["cpu", "cuda", "cuda,cpu"])
def test_the_engine_has_the_cpu_devices_for_any_default_backend(monkeypatch, platforms):
    def local_devices(backend=None):
        backend = backend or platforms.split(",")[0]
        if backend not in platforms:
            raise RuntimeError(f"Unknown backend {backend}")
        return [f"{backend} 0"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert cpu_engine.devices_of("cpu") == (["cpu 0"] if "cpu" in platforms else [])


def test_export_disables_the_checks_of_every_target():
    wanted = {DisabledSafetyCheck.custom_call(t) for t in cpu_engine.load().targets()}
    assert set(export_safety_checks) == wanted
