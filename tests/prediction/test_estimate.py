"""Predictions of single calls."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_programs import StandIn, attribute, custom_calls, lowered_text, shape
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src import methods
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.prediction import estimate as simulate
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.prediction.estimate import OPS
from jax_ub._src.prediction.replay import PRODUCTS
from jax_ub._src.runtime import cpu_engine, cuda_engine

# Partition specs of the operands and of the result.
SPECS = {
    "all_gather_matmul": ((P("tp"), P(None, "tp")), P(None, "tp")),
    "matmul_reduce_scatter": ((P(None, "tp"), P("tp")), P("tp")),
    "matmul_all_reduce": ((P(None, "tp"), P("tp")), P()),
}
SIZES = {"M": 8192, "K": 8192, "N": 10240, "P": 8, "dtype": "bfloat16"}


def estimate(op, method, M, K, N, P, dtype, hardware="h200"):
    """Predicts a call. `method` and `hardware` may be names."""
    choice = method
    if not isinstance(method, MethodChoice):
        choice = MethodChoice(Method(method))
    machine = machines.HARDWARE.get(hardware, hardware)
    return simulate.estimate(op, choice, M, K, N, P, dtype, machine)


def test_every_op_of_the_engine_is_modeled():
    assert set(OPS) == set(cpu_engine.load().ops())


@pytest.mark.parametrize("hardware", ["cpu", "h200"])
@pytest.mark.parametrize("op", OPS)
def test_every_method_has_a_prediction(op, hardware):
    for method in Method:
        found = estimate(op, method, **SIZES, hardware=hardware)
        assert 0 < found.seconds < 60
        assert found.seconds >= found.gemm_s


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_direct_on_a_host_is_its_gemm_and_a_barrier(op):
    machine = machines.HARDWARE["cpu"]
    found = estimate(op, "direct", **SIZES, hardware=machine)
    extra_s = machine.launch_s + machine.handshake_s
    assert found.seconds == pytest.approx(found.gemm_s + extra_s)


@pytest.mark.parametrize("op", OPS)
def test_moved_bytes_are_the_shards_of_the_peers(op):
    rows = {"matmul": 0, "all_reduce": 2, "matmul_all_reduce": 2}.get(op, 1)
    width = 10240 if op in ("matmul_reduce_scatter", "matmul_all_reduce") else 8192
    found = estimate(op, "auto", **SIZES)
    assert found.moved_bytes == rows * 7 / 8 * 8192 * width * 2


@pytest.mark.parametrize("op", PRODUCTS)
def test_auto_is_the_method_that_the_engine_runs(op, monkeypatch):
    monkeypatch.setattr(cuda_engine, "load", StandIn)
    (x, w), y = SPECS[op]
    function = functools.partial(getattr(ub, op), axis_name="tp")
    run = on_ranks(function, tp_mesh(8), (x, w), y)
    for platform, hardware in (("cpu", "cpu"), ("cuda", "h200")):
        text = lowered_text(run, platform, shape(8192, 8192), shape(8192, 10240))
        ((name, call),) = custom_calls(text)
        found = estimate(op, "auto", **SIZES, hardware=hardware)
        assert name == op
        assert attribute(call, "method") == Method(found.method).code
        assert attribute(call, "num_splits") == 0


@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_reduce"])
def test_all_reduces_of_few_tokens_are_one_shot_on_a_gpu(op):
    def found(tokens, method="auto", hardware="h100"):
        sizes = (tokens, 4096, 4096, 8, "bfloat16")
        return estimate(op, method, *sizes, hardware)

    # 47 tokens are the last that fit into 2.7 MB for seven peers.
    few, many = found(47), found(48)
    assert (few.method, few.variant) == ("ring_exchange", "one_shot")
    assert few.moved_bytes == 7 * 47 * 4096 * 2
    assert few.wire_s == few.moved_bytes / 450e9
    assert many.variant == "plain"
    itemsize = 4 if many.method == "xla" else 2  # plain JAX sums in f32
    assert many.moved_bytes == 2 * 7 / 8 * 48 * 4096 * itemsize
    assert found(47, "ring_exchange").variant == "plain"
    assert found(47, "xla").seconds == found(47, "xla").plain_s
    assert found(47, hardware="cpu").variant == "plain"


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("op", OPS)
def test_only_all_reduces_by_ring_exchange_have_the_one_shot_variant(op, hardware):
    def found(method, variant):
        choice = MethodChoice(method, kernel_options=KernelOptions(variant=variant))
        return estimate(op, choice, **SIZES, hardware=hardware)

    for method in Method:
        run = method.forward if op in PRODUCTS else method
        has_one_shot = op.endswith("all_reduce") and run is Method.RING_EXCHANGE
        is_equal = found(method, Variant.ONE_SHOT) == found(method, Variant.PLAIN)
        assert is_equal is not has_one_shot


def test_xla_is_the_gemm_followed_by_the_collective():
    found = estimate("all_gather_matmul", "xla", **SIZES)
    assert found.seconds == found.serial_s > found.gemm_s + found.wire_s


@pytest.mark.parametrize("op", PRODUCTS)
def test_plain_jax_sums_in_f32_but_the_peer_in_the_dtype_of_the_result(op):
    plain, overlapped = (
        estimate(op, method, **SIZES) for method in ("xla", "ring_exchange")
    )
    factor = 1 if op == "all_gather_matmul" else 2
    assert plain.moved_bytes == factor * overlapped.moved_bytes
    alone_s = plain.library_gemm_s + machines.HARDWARE["h200"].collective_s
    sent_s, peer_s = (found_s - alone_s for found_s in (plain.plain_s, plain.serial_s))
    assert sent_s == pytest.approx(factor * peer_s)
    assert plain.seconds == plain.plain_s
    assert overlapped.serial_s == plain.serial_s


@pytest.mark.parametrize("op", PRODUCTS)
def test_auto_on_gpus_is_the_faster_of_overlap_and_plain_jax(op):
    for tokens in (2**n for n in range(6, 14)):
        sizes = (tokens, 8192, 8192, 8, "bfloat16")
        auto, plain, overlapped = (
            estimate(op, method, *sizes)
            for method in ("auto", "xla", methods.auto_on_gpus(gathers="gather" in op))
        )
        if auto.variant == "plain":
            assert auto.seconds == min(plain.seconds, overlapped.seconds)
            assert (
                auto.moved_bytes
                == (plain if auto.method == "xla" else auto).moved_bytes
            )


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_host_sends_what_xla_compiles_for_cpus(op):
    function = functools.partial(getattr(ub, op), axis_name="tp", method="xla")
    (x, w), y = SPECS[op]
    run = on_ranks(function, tp_mesh(2), (x, w), y)
    arrays = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    text = jax.jit(run).lower(*arrays).compile().as_text()
    collective = "all-gather|reduce-scatter|all-reduce"
    (dtype,) = re.findall(rf"= (\w+)\[\S+ (?:{collective})\(", text)
    assert dtype == "f32"  # although x and w are bf16
    found = estimate(op, "xla", 64, 64, 64, 2, jnp.bfloat16, "cpu")
    times = 2 if op == "matmul_all_reduce" else 1
    assert found.moved_bytes == times / 2 * 64 * 64 * 4
    assert found.serial_s == found.plain_s


@pytest.mark.parametrize("method", ["auto", "xla"])
def test_sums_of_f64_have_eight_bytes(method):
    found = estimate("all_reduce", method, 8, 4, 4, 2, np.float64, "cpu")
    assert found.moved_bytes == 8 * 4 * 8


def test_time_and_bytes_grow_with_the_dtype():
    narrow, wide = (
        estimate("all_gather_matmul", "auto", 8192, 8192, 10240, 8, dtype)
        for dtype in (ml_dtypes.bfloat16, np.float32)
    )
    assert wide.gemm_s == 2 * narrow.gemm_s
    assert wide.moved_bytes == 2 * narrow.moved_bytes


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_of_fp8_products_have_16_bits(op):
    fp8, bf16 = (
        estimate(op, "auto", 8192, 8192, 8192, 8, dtype, "h100")
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16)
    )
    assert fp8.gemm_s == bf16.gemm_s / 2
    assert fp8.moved_bytes == bf16.moved_bytes
    assert fp8.collective_s == bf16.collective_s


@pytest.mark.parametrize("hardware", ["cpu", "a100"])
def test_machines_without_fp8_multiply_it_as_bf16(hardware):
    fp8, bf16 = (
        estimate("matmul", "auto", 8192, 8192, 8192, 8, dtype, hardware)
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16)
    )
    assert fp8.seconds == bf16.seconds


def test_the_splits_of_a_call_are_predicted():
    def seconds(method):
        return estimate("matmul_reduce_scatter", method, **SIZES).seconds

    whole, split = (MethodChoice(Method.PIPELINE, num) for num in (1, 4))
    assert seconds("pipeline") == seconds(split)  # what the engine runs by default
    assert seconds(whole) < seconds(split)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA H20", None),
    ],
)
def test_gpus_are_known_by_their_device_kind(kind, name):
    assert machines.name_of_kind(kind) == name


def test_auto_on_one_gpu_is_xla():
    sizes = {**SIZES, "P": 1}
    found = estimate("all_gather_matmul", "auto", **sizes)
    assert (found.method, found.seconds) == ("xla", found.serial_s)


def test_a_host_is_predicted_from_its_measured_rates():
    fast, slow = (
        estimate("matmul", "auto", **SIZES, hardware=machines.host(rate, 1e10)).seconds
        for rate in (2e12, 1e12)
    )
    assert slow == 2 * fast
    known = machines.host(1e12, 1e10, flops_f32_per_s=3e12)
    sizes = SIZES | {"dtype": np.float32}
    assert estimate("matmul", "auto", **sizes, hardware=known).seconds == fast * 2 / 3
