"""jax_ub._cuda can be imported anywhere, links no CUDA library, and is optional."""

import ctypes
import importlib.util
import pathlib
import re
import struct
import subprocess
import sys

import pytest
from tools import tool

SPEC = importlib.util.find_spec("jax_ub._cuda")
built = pytest.mark.skipif(SPEC is None, reason="built without nvcc: no jax_ub._cuda")


def output(*command):
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def there_is_a_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_package_neither_loads_nor_needs_it_without_a_gpu():
    # None: importing it is an error, as in a build without a CUDA toolkit.
    program = """
import sys
sys.modules["jax_ub._cuda"] = None
import jax, jax.numpy as jnp
import jax_ub as ub
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
spec = jax.sharding.PartitionSpec
linear = jax.shard_map(
    lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
    mesh=mesh,
    in_specs=(spec("tp"), spec(None, "tp")),
    out_specs=spec(None, "tp"))
assert (linear(x, w) == 8).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_importing_the_package_does_not_load_it():
    program = "import jax_ub, sys; assert 'jax_ub._cuda' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@built
def test_missing_driver_is_reported_with_a_reason():
    from jax_ub import _cuda

    if there_is_a_driver():
        pytest.skip("there is an NVIDIA driver")
    assert "libcuda.so.1 was not found" in _cuda.why_not()
    for function in (_cuda.devices, _cuda.driver_version):
        with pytest.raises(RuntimeError, match="there is no NVIDIA driver here"):
            function()


@built
def test_it_lists_the_devices():
    from jax_ub import _cuda

    if not there_is_a_driver() or _cuda.why_not() is not None:
        pytest.skip("no NVIDIA GPU here")
    assert _cuda.driver_version() >= 12000
    for ordinal, device in enumerate(_cuda.devices()):
        assert device["ordinal"] == ordinal
        assert device["compute_capability"] >= (5, 0)
        assert device["num_sms"] > 0 and device["memory_bytes"] > 0


@built
def test_it_links_no_cuda_library():
    needed = re.findall(r"NEEDED.*\[(.*)\]", output(tool("readelf"), "-d", SPEC.origin))
    libraries = {name.partition(".so")[0] for name in needed}
    assert "libc" in libraries
    assert libraries <= {"libc", "libm", "libdl", "libpthread", "libstdc++", "libgcc_s"}


@built
def test_it_exports_only_its_entry_point():
    table = output(tool("nm"), "-D", "--defined-only", SPEC.origin)
    assert [line.split()[-1] for line in table.splitlines()] == ["PyInit__cuda"]


def images(library):
    """Returns the architectures of each fatbin; ("elf", 90) is code for sm_90."""
    fatbin, entry = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
    begin = -1
    while (begin := library.find(b"\x50\xed\x55\xba\x01\x00", begin + 1)) >= 0:
        _, _, header_size, size = fatbin.unpack_from(library, begin)
        at = begin + header_size
        found = set()
        while at < begin + header_size + size:
            kind, _, header, length, *_, number = entry.unpack_from(library, at)
            found.add(({1: "ptx", 2: "elf"}[kind], number))
            at += header + length
        yield found


@built
def test_every_architecture_has_its_kernels():
    known = output(tool("nvcc"), "--list-gpu-code").split()
    expected = {("ptx", 80)} | {
        ("elf", number) for number in (80, 90, 100, 120) if f"sm_{number}" in known
    }
    found = list(images(pathlib.Path(SPEC.origin).read_bytes()))
    kernels = list((pathlib.Path(__file__).parents[1] / "csrc").rglob("*.cu"))
    # Multicast needs sm_90.
    newer = {(kind, number) for kind, number in expected if number >= 90}
    found.remove(newer | {("ptx", 90)})
    assert found and found == [expected] * (len(kernels) - 1)
