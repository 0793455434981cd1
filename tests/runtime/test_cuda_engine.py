"""Loading the CUDA engine, and registering it with XLA."""

import importlib
import subprocess
import sys
import types

import jax
import pytest
from cuda_programs import StandIn
from jaxlib import xla_client

from jax_ub._src.runtime import backend, cpu_engine, cuda_engine


class Device(types.SimpleNamespace):
    def __init__(self, platform, version, **attributes):
        client = types.SimpleNamespace(platform_version=version)
        super().__init__(platform=platform, client=client, **attributes)


NVIDIA = Device("gpu", "PJRT C API\ncuda 13000", id=5, local_hardware_id=1)
AMD = Device("gpu", "PJRT C API\nrocm 60300", id=0, local_hardware_id=0)


@pytest.fixture
def fresh():
    cached = cuda_engine.load, cuda_engine.register_targets
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def built(monkeypatch, fresh):
    """Installs a fake CUDA engine; returns the settings that it receives."""
    received = {}
    module = types.ModuleType("jax_ub._cuda")
    module.xla_ffi_api_version = (0, 3)
    names = ("set_library_paths", "set_timeout_s", "set_nvls", "set_local_devices")
    for name in names:
        setattr(module, name, lambda value, name=name: received.update({name: value}))
    module.call_site_type = lambda: "the type"
    module.targets = lambda several: {"jax_ub$matmul": f"handlers, {several}"}
    monkeypatch.setitem(sys.modules, "jax_ub._cuda", module)
    return received


def test_a_build_without_nvcc_is_reported(monkeypatch, fresh):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="_cuda is missing, since no nvcc was found"):
        cuda_engine.load()
    assert "where nvcc is installed: pip install ." in cuda_engine.why_not()


def test_an_engine_for_newer_headers_is_rejected(monkeypatch, built):
    monkeypatch.setattr(cpu_engine, "running_ffi_api", lambda: (0, 2))
    with pytest.raises(
        ImportError, match=r"built for XLA FFI API 0\.3, but jax .* 0\.2"
    ):
        cuda_engine.load()


def test_settings_are_passed_to_the_engine(monkeypatch, built):
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", "7")
    monkeypatch.setattr(cuda_engine, "library_paths", lambda: ["/nvidia"])
    cuda_engine.load()
    expected = {"set_library_paths": ["/nvidia"], "set_timeout_s": 7}
    assert built == {**expected, "set_nvls": False}


def test_multicast_is_enabled_by_its_variable(monkeypatch, built):
    monkeypatch.setenv("JAX_UB_NVLS", "1")
    cuda_engine.load()
    assert built["set_nvls"] is True


def test_cublaslt_is_searched_in_nvidias_wheels(monkeypatch, tmp_path):
    for folder, name in (
        ("cu13/lib", "so.13"),
        ("cublas/lib", "so.12"),
        ("x", "so.13"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"libcublasLt.{name}").touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert cuda_engine.library_paths() == [
        str(tmp_path / "cu13/lib"),
        str(tmp_path / "cublas/lib"),
    ]
    (tmp_path / "cu13/lib/libcublasLt.so.13").unlink()
    assert cuda_engine.library_paths() == [str(tmp_path / "cublas/lib")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_engine.library_paths() == []


@pytest.fixture
def plugin(monkeypatch):
    """Installs a fake of the CUDA plugin of jax 0.11, which rejects traits."""
    registered = []

    def take_type(name, capsules):
        registered.append((name, capsules))

    def take_target(name, handlers, platform, api_version, traits):
        assert platform == "CUDA"
        assert traits == 0, "The plugin does not support custom call traits."
        registered.append((name, handlers, api_version))

    monkeypatch.setitem(xla_client._custom_type_id_handler, "CUDA", take_type)
    monkeypatch.setitem(xla_client._custom_callback_handler, "CUDA", take_target)
    return registered


@pytest.mark.parametrize("num_devices", [1, 2])
def test_targets_are_registered_after_their_type(
    monkeypatch, built, plugin, num_devices
):
    other = Device("gpu", "PJRT C API\ncuda 13000", id=6, local_hardware_id=2)
    devices = [NVIDIA, other][:num_devices]
    monkeypatch.setattr(cuda_engine, "local_devices", lambda: devices)
    cuda_engine.register_targets()
    cuda_engine.register_targets()
    ids = {device.local_hardware_id: device.id for device in devices}
    assert built["set_local_devices"] == ids
    # XLA may capture the calls of a process with one device.
    assert plugin == [
        ("jax_ub$CudaCallSite", "the type"),
        ("jax_ub$matmul", f"handlers, {num_devices > 1}", 1),
    ]


def test_without_cuda_devices_nothing_is_registered(monkeypatch, fresh):
    monkeypatch.setattr(cuda_engine, "load", lambda: pytest.fail("was loaded"))
    cuda_engine.register_targets()
    backend.register_targets()
    assert cuda_engine.failures() == {}
    assert cuda_engine.usable_devices() == []
    cuda_engine.release_in_process()


def test_nvidia_and_amd_gpus_are_distinguished():
    assert (cuda_engine.is_cuda(NVIDIA), cuda_engine.is_cuda(AMD)) == (True, False)
    assert cuda_engine.platform_of(NVIDIA) == "cuda"
    assert cuda_engine.platform_of(AMD) == "rocm"
    assert cuda_engine.platform_of(jax.devices()[0]) == "cpu"
    assert not cuda_engine.is_default()


def test_only_different_devices_need_peer_access(monkeypatch):
    native = StandIn()
    native.why_no_peers = lambda ordinals: f"asked for {ordinals}"
    monkeypatch.setattr(cuda_engine, "load", lambda: native)
    assert cuda_engine.why_no_peers([NVIDIA, NVIDIA]) is None
    assert cuda_engine.why_no_peers([NVIDIA, AMD]) == "asked for [0, 1]"


def test_a_program_on_a_cpu_does_not_load_the_cuda_engine():
    program = """
import sys
import jax
import numpy as np
import jax_ub as ub
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("tp",))
f = jax.shard_map(lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"), mesh=mesh,
                  in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
ub.initialize_ub((8, 8), 1, mesh=mesh)
jax.jit(jax.grad(lambda x, w: f(x, w).sum()))(np.ones((4, 4)), np.ones((4, 4)))
ub.memory_report()
ub.destroy_ub()
assert "jax_ub._cuda" not in sys.modules, "loaded"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_concurrent_command_buffers_are_rejected(monkeypatch, built):
    flag = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert "run them in the order of the program: remove" in cuda_engine.why_not()


def test_an_invalid_setting_is_the_reason(monkeypatch, built):
    monkeypatch.setenv("JAX_UB_TIMEOUT_S", "many")
    assert "JAX_UB_TIMEOUT_S" in cuda_engine.why_not()
