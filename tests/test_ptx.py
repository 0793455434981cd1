"""The PTX of the kernels with flags, whose instructions the other tests emulate."""

import pathlib
import re
import subprocess

import pytest
from tools import tool

CSRC = pathlib.Path(__file__).parents[1] / "csrc"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Returns, by kernel, accesses of shared memory and barriers, in order."""
    nvcc = tool("nvcc")
    path = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    options = ("-ptx", "-std=c++20", "-arch=compute_80", f"-I{CSRC}", "-o", path)
    found = {}
    for name in ("flag_kernels", "all_reduce_kernel"):
        source = CSRC / f"transport/cuda/{name}.cu"
        subprocess.run([nvcc, *options, source], check=True)
        entry = r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}"
        for kernel, body in re.findall(entry, path.read_text(), re.S):
            access = r"\b(?:(?:ld|st|atom|red)\S*global\S*|bar\.\S+)"
            found[kernel] = re.findall(access, body)
    return found


def test_flags_are_acquired_from_and_released_to_the_whole_system(kernels):
    # The words of the rank need no order: earlier kernels of the stream wrote them.
    own, release = "ld.relaxed.sys.global.u64", "st.release.sys.global.u64"
    # A signal has no access of shared memory before its first flag operation or after
    # the last one.
    assert set(kernels["jax_ub_signal"]) == {own, release}
    acquire = "ld.acquire.sys.global.u64"
    for name in ("jax_ub_wait", "jax_ub_end"):
        words = {found for found in kernels[name] if found.endswith("64")}
        flags = {own, release} | ({acquire} if name == "jax_ub_wait" else set())
        # The compare-and-swap is on a word of this device. The time that a wait took is
        # stored in its record.
        others = {"atom.global.cas.b64", "st.global.u64"}
        if name == "jax_ub_wait":
            # An announcement publishes no data, so it is a relaxed store.
            others.add("st.relaxed.sys.global.u64")
        assert flags <= words <= flags | others


def test_flag_kernels_take_few_registers(tmp_path):
    # A GEMM of cuBLAS leaves few free registers on a multiprocessor.
    nvcc = tool("nvcc")
    source = CSRC / "transport/cuda/flag_kernels.cu"
    options = ("-cubin", "-std=c++20", "-arch=sm_90", f"-I{CSRC}", "-Xptxas", "-v")
    command = [nvcc, *options, "-o", tmp_path / "flag_kernels.cubin", source]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", said, re.S)
    assert len(used) == 5, said
    for name, registers in used:
        assert int(registers) <= 32, name
        assert "0 bytes spill stores" in said.split(name, 1)[1]


def test_a_record_is_whole_when_its_code_is_seen(kernels):
    for name in ("jax_ub_wait", "jax_ub_end", "jax_ub_check_partition"):
        _, *failures = " ".join(kernels[name]).split("atom.global.cas.b64")
        assert failures
        for stores in failures:
            record, code, behind = stores.partition("st.release.sys.global.u32")
            assert code and "st.global" in record and "st.global" not in behind
    assert "ld.acquire.sys.global.u32" in kernels["jax_ub_wait"]  # poison by the host


def test_all_lanes_have_read_the_epoch_before_one_raises_it(kernels):
    found = kernels["jax_ub_end"]
    barrier = found.index("bar.warp.sync")
    (of_block,) = (i for i, name in enumerate(found) if name.startswith("bar.red"))
    assert barrier < of_block
    assert found[barrier:].count("ld.relaxed.sys.global.u64") == 0


def test_a_wait_sends_its_signals_before_it_polls(kernels):
    found = kernels["jax_ub_wait"]
    barrier = found.index("bar.warp.sync")
    assert "st.release.sys.global.u64" in found[:barrier]
    assert "st.relaxed.sys.global.u64" in found[:barrier]


def test_an_all_reduce_pushes_between_two_barriers_and_signals_after_them(kernels):
    found = kernels["jax_ub_all_reduce"]
    freed, pushed, arrived = (
        i
        for i, name in enumerate(found)
        if name.startswith("bar.") and name != "bar.warp.sync"
    )
    release = found.index("st.release.sys.global.u64")
    assert freed < pushed < release < arrived
    # All signals are sent before any thread waits.
    assert "bar.warp.sync" in found[release:arrived]
    # Threads read what they have waited for with loads that no cache may serve.
    assert not any(".nc" in name for name in found)
