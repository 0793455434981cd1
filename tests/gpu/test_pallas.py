"""AG+GEMM by JAX's Pallas kernel, which a tuned file chose, lowered without a GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import nightly
from cuda_programs import (
    StandIn,
    attribute,
    called,
    collectives,
    cuda_text,
    custom_calls,
    exported_cuda_text,
    lowered_text,
    shape,
)
from jax.sharding import PartitionSpec as P
from programs import dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.lowering_log import recording
from jax_ub._src.methods import PALLAS_TILES, KernelOptions, Method, MethodChoice
from jax_ub._src.primitives.mesh import find_ranks
from jax_ub._src.runtime import cuda_engine, settings, tuned_file
from jax_ub._src.runtime.tuned_file import TunedKey, environment
from jax_ub._src.tools.explain import program, report

RANKS, M, K, N = 4, 1024, 128, 1024
TILES = PALLAS_TILES[0]
NEXT = MethodChoice(Method.RING_EXCHANGE, kernel_options=KernelOptions(num_lanes=3))
KERNEL = "custom_call @mosaic_gpu_v2"
SPECS = (P("tp"), P(None, "tp"))
X, W = shape(M, K, dtype="bfloat16"), shape(K, N, dtype="bfloat16")

pytest.importorskip(
    "jax.experimental.pallas.ops.gpu.collective_matmul_mgpu",
    reason="this jax has no collective matmul in Pallas",
)
has_barrier = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="this jax runs the kernel without a barrier between the GPUs",
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    compute_capability: str = "9.0"
    core_count: int = 132


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that makes JAX report so many GPUs, four by default.

    Meshes of CPU devices are lowered as if their devices were these GPUs.
    """

    def report_gpus(number=RANKS, capability="9.0"):
        found = [Gpu(i, capability) for i in range(number)]
        monkeypatch.setattr(jax, "devices", lambda *platform: found)
        monkeypatch.setattr(jax, "device_count", lambda: number)
        monkeypatch.setattr(jax, "local_device_count", lambda: number)

        def ranks_on_gpus(*arguments, **options):
            ranks = find_ranks(*arguments, **options)
            groups = tuple(
                tuple(Gpu(device.id, capability) for device in group)
                for group in ranks.groups
            )
            return dataclasses.replace(ranks, groups=groups)

        name = "jax_ub._src.primitives.lowering.find_ranks"
        monkeypatch.setattr(name, ranks_on_gpus)

    monkeypatch.setenv("XLA_FLAGS", settings.COLLECTIVES_IN_ORDER)
    cpus = jax.devices()
    monkeypatch.setattr("programs.devices", lambda number: cpus[:number])
    monkeypatch.setattr(cuda_engine, "load", StandIn)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr("jax_ub._src.primitives.lowering._why_no_peers", lambda _: None)
    report_gpus()
    return report_gpus


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Returns a function that tunes an AG+GEMM of [M, K] and [K, N]."""

    def write(choice=NEXT, tiles=TILES, dtype="bfloat16", **sizes):
        sizes = {"num_ranks": RANKS, "M": M, "K": K, "N": N, **sizes}
        case = TunedKey("all_gather_matmul", dtype=dtype, **sizes)
        choice = dataclasses.replace(choice, pallas=tiles)
        tuned_file.write(tmp_path / "t.json", {environment(): {case: (choice, {})}})
        monkeypatch.setenv("JAX_UB_TUNED", str(tmp_path / "t.json"))
        ub.fallbacks(clear=True)

    write()
    return write


def column(mesh=None, specs=SPECS, out_specs=SPECS[1], **options):
    function = functools.partial(ub.all_gather_matmul, axis_name="tp", **options)
    return on_ranks(function, mesh or tp_mesh(RANKS), specs, out_specs)


@has_barrier
@pytest.mark.parametrize("batch", [(), (1, 1), *nightly((1,))])
def test_the_kernel_runs_the_call_for_which_it_was_chosen(gpus, choose, batch):
    specs = tuple(P(*(None for _ in batch), *spec) for spec in SPECS)
    run = column(specs=(specs[0], SPECS[1]), out_specs=specs[1])
    with recording() as lowered:
        text = cuda_text(run, shape(*batch, M, K, dtype="bfloat16"), W)
    (kernel,) = re.findall(rf"{KERNEL}.*", text)
    assert "skip_device_barrier = false" in kernel
    assert "latency_metadata" not in kernel
    assert not called(text) and not collectives(text)
    assert not ub.fallbacks()
    (one,) = lowered
    assert (one.method, one.tiles, one.reason) == (NEXT.method, TILES, None)
    (row,) = program.call_rows(lowered, report.find_hardware("h100"), {}, ())
    assert row.overlapped and row.method == "pallas" and row.predicted_s is None
    assert f"JAX's kernel, with {TILES}, the fastest by a tuned table" in row.note


@has_barrier
def test_a_mesh_may_have_other_axes_of_one_device(gpus, choose):
    text = cuda_text(column(dp_tp_mesh(1, RANKS)), X, W)
    assert text.count(KERNEL) == 1


@has_barrier
def test_gradients_run_as_without_the_kernel(gpus, choose):
    def loss(x, w):
        y = ub.all_gather_matmul(x, w, axis_name="tp")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    run = on_ranks(jax.grad(loss, (0, 1)), tp_mesh(RANKS), SPECS, SPECS)
    text = cuda_text(run, X, W)
    assert text.count(KERNEL) == 1
    assert called(text) == {"bulk_all_gather": 1, "bulk_reduce_scatter": 1}
    assert not ub.fallbacks()


@has_barrier
def test_a_row_layer_gathers_its_gradient_without_the_kernel(gpus, choose):
    choose(K=N, N=K * RANKS)

    def loss(x, w):
        y = ub.matmul_reduce_scatter(x, w, axis_name="tp")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    specs = SPECS[::-1]
    run = on_ranks(jax.grad(loss, (0, 1)), tp_mesh(RANKS), specs, specs)
    text = cuda_text(
        run,
        shape(M, K * RANKS, dtype="bfloat16"),
        shape(K * RANKS, N, dtype="bfloat16"),
    )
    assert KERNEL not in text
    assert called(text)["all_gather_matmul"] == 1
    assert "it takes no kernel [out, in]" in ub.fallbacks()[0].reason


@has_barrier
def test_layers_in_a_scan_run_the_kernel(gpus, choose):
    choose(K=N)

    def layers(x, ws):
        def layer(x, w):
            y = ub.all_gather_matmul(x, w, axis_name="tp")
            return ub.all_reduce(y[: M // RANKS] @ w.T, axis_name="tp"), None

        return jax.lax.scan(jax.checkpoint(layer), x, ws)[0]

    specs = (P("tp"), P(None, None, "tp"))
    run = on_ranks(layers, tp_mesh(RANKS), specs, P("tp"), check_vma=False)
    operands = shape(M, N, dtype="bfloat16"), shape(3, N, N, dtype="bfloat16")
    assert cuda_text(run, *operands).count(KERNEL) == 1


@has_barrier
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": np.ones(N // RANKS, jnp.bfloat16)}, "it adds no bias"),
        ({"return_gathered": True}, "it does not return the gathered x"),
        ({"out_dtype": jnp.float32}, "one dtype, not bfloat16 and float32"),
    ],
)
def test_a_call_that_the_kernel_cannot_run_has_the_next_fastest_method(
    gpus, choose, options, reason
):
    out_specs = (SPECS[1], P()) if "return_gathered" in options else SPECS[1]
    run = functools.partial(ub.all_gather_matmul, axis_name="tp", **options)
    with recording() as lowered:
        mesh = tp_mesh(RANKS)
        text = cuda_text(on_ranks(run, mesh, SPECS, out_specs, check_vma=False), X, W)
    check_next(text, lowered, reason)


def check_next(text, lowered, reason):
    ((name, call),) = custom_calls(text)
    assert name == "all_gather_matmul" and KERNEL not in text
    assert attribute(call, "method") == NEXT.method.code
    assert attribute(call, "num_lanes") == NEXT.kernel_options.num_lanes
    (fallback,) = ub.fallbacks()
    assert fallback.reason.startswith("JAX's Pallas kernel, the fastest by a tuned")
    assert reason in fallback.reason
    assert fallback.reason.endswith(f"{NEXT} runs it")
    (row,) = program.call_rows(lowered, report.find_hardware("h100"), {}, ())
    assert row.overlapped and row.method == NEXT.method.value
    assert "not pallas: " in row.note and reason in row.note


def test_calls_of_other_kernels_have_the_next_fastest_method(gpus, choose):
    def both(x, w):
        return ub.all_gather_matmul(x, tuple(jnp.split(w, 2, 1)), axis_name="tp")

    with recording() as lowered:
        run = on_ranks(both, tp_mesh(RANKS), SPECS, (SPECS[1],) * 2)
        text = cuda_text(run, X, W)
    check_next(text, lowered, "it multiplies one kernel, not 2")
    ub.fallbacks(clear=True)
    with recording() as lowered:
        run = column(specs=(P("tp"),) * 2, rhs_transposed=True)
        text = cuda_text(run, X, shape(N, K, dtype="bfloat16"))
    check_next(text, lowered, "it takes no kernel [out, in]")


def test_calls_with_leading_axes_have_the_next_fastest_method(gpus, choose):
    spec = P(None, "tp")
    with recording() as lowered:
        run = column(specs=(spec, SPECS[1]), out_specs=P(None, None, "tp"))
        text = cuda_text(run, shape(2, M // 2, K, dtype="bfloat16"), W)
    check_next(text, lowered, "it takes no leading axes of x")


@pytest.mark.parametrize(
    ("reported", "mesh", "reason"),
    [
        ({"capability": "10.0"}, tp_mesh, "needs compute capability 9.0, not 10.0"),
        ({"number": 8}, tp_mesh, "P is 4, and JAX has 8 devices"),
        (
            {"number": 8},
            lambda ranks: dp_tp_mesh(2, ranks),
            "P is 4, and JAX has 8 devices",
        ),
    ],
)
def test_calls_on_other_devices_have_the_next_fastest_method(
    gpus, choose, reported, mesh, reason
):
    mesh = mesh(RANKS)
    gpus(**reported)
    with recording() as lowered:
        text = cuda_text(column(mesh), X, W)
    check_next(text, lowered, reason)


@pytest.mark.parametrize("flags", ["", "--xla_gpu_disable_async_collectives=ALLTOALL"])
def test_concurrent_collectives_select_the_next_fastest_method(
    gpus, choose, monkeypatch, flags
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with recording() as lowered:
        text = cuda_text(column(), X, W)
    check_next(text, lowered, "Add --xla_gpu_disable_async_collectives=ALLCOLLECTIVES")


def test_an_exported_program_has_the_next_fastest_method(gpus, choose):
    with recording() as lowered:
        text = exported_cuda_text(column(), X, W)
    check_next(text, lowered, "it is not part of an exported program")


@has_barrier
def test_tiles_of_other_sizes_are_not_used(gpus, choose):
    # As in a file that was edited. Twice 128 columns do not divide the 128 of a rank.
    choose(N=512)
    with recording() as lowered:
        text = cuda_text(column(), X, shape(K, 512, dtype="bfloat16"))
    check_next(text, lowered, "the tuned tiles do not divide the sizes of a rank")


def test_the_next_fastest_method_may_be_xla(gpus, choose):
    choose(MethodChoice(Method.XLA))
    gpus(capability="8.0")
    text = cuda_text(column(), X, W)
    assert not called(text) and collectives(text) == {"all_gather": 1}
    (fallback,) = ub.fallbacks(clear=True)
    assert fallback.reason.endswith("not 8.0. xla runs it")
    assert collectives(lowered_text(column(), "cpu", X, W)) == {"all_gather": 1}
    assert "the program is lowered for CPUs. xla runs it" in ub.fallbacks()[0].reason


@has_barrier
def test_the_kernel_may_be_faster_than_xla_and_all_methods(gpus, choose):
    choose(MethodChoice(Method.XLA))
    text = cuda_text(column(), X, W)
    assert text.count(KERNEL) == 1 and not collectives(text)


@pytest.mark.parametrize("method", ["pipeline", "xla"])
def test_a_named_method_does_not_use_the_kernel(gpus, choose, method):
    text = cuda_text(column(method=method), X, W)
    assert KERNEL not in text
    assert not ub.fallbacks()


def test_cpus_run_the_next_fastest_method(choose):
    text = lowered_text(column(), "cpu", X, W)
    ((_, call),) = custom_calls(text)
    assert attribute(call, "method") == NEXT.method.code
