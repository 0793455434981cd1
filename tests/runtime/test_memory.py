import dataclasses
import types

import jax.numpy as jnp
import pytest
from cuda_programs import StandIn
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.runtime import communicators, cpu_engine, cuda_engine, registry

NONE, FP8 = ub.UserBufferQuantizationMode.NONE, ub.UserBufferQuantizationMode.FP8


def test_no_memory_is_held_before_initialize_ub():
    report = ub.memory_report()
    assert report.axes == ()
    assert report.held_bytes == report.transformer_engine_bytes == 0


def test_transformer_engine_would_have_twelve_buffers_per_mode():
    ub.initialize_ub((64, 32), 4, mesh=tp_mesh(4))
    (axis,) = ub.memory_report().axes
    assert axis.num_ranks == 4
    assert axis.transformer_engine_bytes == 4 * 12 * 64 * 32 * 2
    assert [one.name for one in axis.overlaps][:2] == ["qkv_fprop", "qkv_dgrad"]


def test_fp8_buffers_and_unused_ones_count_for_transformer_engine():
    cfgs = {"qkv_dgrad": {"method": "ring_exchange"}}
    ub.initialize_ub(
        (64, 32), 4, quantization_modes=[NONE, FP8], ub_cfgs=cfgs, mesh=tp_mesh(4)
    )
    (axis,) = ub.memory_report().axes
    assert len(axis.overlaps) == 2 * 11
    elements, ring = 64 * 32, 64 * 32 * 7 // 4
    # Ten plain buffers, one unused buffer and one for the ring; in FP8, eight names
    # all-gather.
    none = (11 * elements + ring) * 2
    fp8 = 7 * elements + (4 * elements + ring) * 2
    assert axis.transformer_engine_bytes == 4 * (none + fp8)


def test_ranks_of_one_process_share_no_buffer_and_free_their_slots():
    ub.initialize_ub((64, 32), 4, dtype=jnp.float32, mesh=tp_mesh(4))

    def call(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv")

    layer = on_ranks(call, tp_mesh(4), (P("tp"), P(None, "tp")), P(None, "tp"))
    layer(jnp.ones((64, 32)), jnp.ones((32, 8))).block_until_ready()
    report = ub.memory_report()
    assert report.axes[0].shared_bytes == 0
    assert 0 < report.held_bytes == report.slot_bytes < report.transformer_engine_bytes
    ub.destroy_ub()
    assert cpu_engine.load().counters()["slot_bytes"] == 0


def test_the_report_is_a_table():
    ub.initialize_ub((64, 32), 4, use_fp8=True, mesh=tp_mesh(4))
    lines = str(ub.memory_report()).splitlines()
    assert (
        lines[0]
        == "axis ('tp',), 4 ranks, 4 of them in this process, [T, H] = [64, 32]"
    )
    assert "none, since ranks of one process read each other's arrays" in lines[1]
    (row,) = [line for line in lines if "qkv_fprop" in line]
    assert row.split()[:5] == ["qkv_fprop", "FP8", "ring_exchange", "AG", "uint8"]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_report_says_why_ranks_have_no_buffers(platform, monkeypatch):
    ub.initialize_ub((64, 32), 2, mesh=tp_mesh(2))
    (axis,) = registry.axes()
    groups = dataclasses.replace(axis.device_groups, platform=platform)
    axis = dataclasses.replace(axis, device_groups=groups)
    monkeypatch.setitem(registry._AXES, axis.axis_name, axis)
    reason = "its ranks span the hosts a and b"
    connection = communicators.Connection(groups.groups[0], platform, (0, 1), reason)
    monkeypatch.setitem(communicators._CONNECTIONS, connection.key, connection)
    (found,) = ub.memory_report().axes
    assert (found.on_gpus, found.shared_bytes) == (platform == "cuda", 0)
    assert f"  buffers: none: {reason}\n" in str(found)


def test_gpu_heaps_are_reported_with_xlas_share(monkeypatch):
    class Heap:
        size_bytes = 3 << 20
        failure = None

        def close(self):
            pass

    class Gpus(StandIn):
        def counters(self):
            return {"heap_bytes": 5 << 20}

        def devices(self):
            return [{"ordinal": 0, "name": "H200", "memory_bytes": 140 << 30}]

        def release_in_process(self):
            pass

    device = types.SimpleNamespace(local_hardware_id=0)
    monkeypatch.setattr(cuda_engine, "load", Gpus)
    monkeypatch.setattr(cuda_engine, "local_devices", lambda: [device])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    ub.initialize_ub((64, 32), 2, mesh=tp_mesh(2))
    (axis,) = registry.axes()
    groups = dataclasses.replace(axis.device_groups, platform="cuda")
    gpus = dataclasses.replace(axis, device_groups=groups)
    monkeypatch.setitem(registry._AXES, axis.axis_name, gpus)
    connection = communicators.Connection(
        groups.groups[0], "cuda", (0, 0), None, Heap()
    )
    monkeypatch.setitem(communicators._CONNECTIONS, connection.key, connection)
    report = ub.memory_report()
    assert report.axes[0].shared_bytes == 3 << 20
    assert report.heap_bytes == 2 << 20
    assert report.held_bytes == report.slot_bytes + (5 << 20)
    assert "buffers: heaps of 3.0 MiB, shared by all names" in str(report)
    assert "heaps of calls without initialize_ub: 2.0 MiB" in str(report)
    # The name that JAX does not warn about.
    assert "which XLA preallocates 70.0 GiB (XLA_CLIENT_MEM_FRACTION, " in str(report)
    assert "heaps use the other 70.0 GiB" in str(report)
