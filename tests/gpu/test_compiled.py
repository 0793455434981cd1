"""Programs compiled for an H200; JAX's plugin for CUDA compiles them without a GPU.

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION

VERSION is the version of jax. No other part of CUDA is needed: handlers are registered
with the plugin, and are called only to instantiate calls during compilation.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src.methods import PALLAS_TILES, Method, MethodChoice
from jax_ub._src.prediction import estimate as simulate
from jax_ub._src.prediction.hardware import HARDWARE
from jax_ub._src.runtime import cuda_engine, settings, tuned_file
from jax_ub._src.runtime.tuned_file import TunedKey, environment
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import Ranks
from jax_ub._src.tools.programs import pallas_programs
from jax_ub.flax import TransformerLayer

# The fields of XLA's device description that its compiler reads.
H200 = """
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" core_count: 132
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 device_memory_size: 150000000000
  l2_cache_size: 52428800 device_address_bits: 64 dnn_version: "9.10.0"
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""
LAYERS, M, K, N = 3, 1024, 256, 512
# Lets calls in a scan read slices of its operands in place. This is the default in the
# XLA of jax 0.12, but not in the XLA of jax 0.10.2, which copies each slice.
SLICES_IN_PLACE = {"xla_gpu_enable_dynamic_slice_fusion": True}


class WithoutDriver:
    """Returns the engine, without functions that need a driver."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def set_local_devices(self, devices):
        pass


@pytest.fixture
def mesh(monkeypatch):
    pytest.importorskip(
        "jax_plugins.xla_cuda13",
        reason="jax-cuda13-plugin and jax-cuda13-pjrt are not installed",
    )
    pytest.importorskip("jax_ub._cuda", reason="built without nvcc")
    engine = WithoutDriver(cuda_engine.load())
    jax.devices()  # loads plugins
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology="1x1x4"
    ).devices
    monkeypatch.setattr(cuda_engine, "load", lambda: engine)
    monkeypatch.setattr(cuda_engine, "is_cuda", lambda device: device.platform == "gpu")
    # As in a process with one GPU, whose calls may be captured.
    monkeypatch.setattr(cuda_engine, "local_devices", lambda: devices[:1])
    monkeypatch.setattr(cuda_engine, "why_not", lambda: None)
    monkeypatch.setattr(cuda_engine, "why_no_peers", lambda devices: None)
    cuda_engine.register_targets.cache_clear()
    yield Mesh(np.array(devices), ("tp",))
    cuda_engine.register_targets.cache_clear()


def lowered(function, mesh, in_specs, out_specs, *shapes, donated=()):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    operands = [
        jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
        for spec, (dtype, *sizes) in zip(in_specs, shapes, strict=True)
    ]
    return jax.jit(mapped, donate_argnums=donated).lower(*operands)


def compiled(*arguments, options=None, **donated):
    return lowered(*arguments, **donated).compile(options).as_text()


def calls(text):
    return sorted(re.findall(r'custom_call_target="jax_ub\$(\w+)"', text))


def copies(text, dtype=r"\w+"):
    return re.findall(rf" = {dtype}\[\d[\d,]*\]\S* copy\(", text)


def compiled_scan(mesh, rows, features):
    """Compiles the gradients of a scan over column- and row-parallel layers."""

    def layer(x, kernels):
        w, v = kernels
        # Its derivative needs its input: the product is saved and read again.
        h = jax.nn.gelu(ub.all_gather_matmul(x, w, axis_name="tp"))
        return ub.matmul_reduce_scatter(h, v, axis_name="tp"), None

    def loss(x, w, v):
        return jnp.sum(jax.lax.scan(layer, x, (w, v))[0].astype(jnp.float32))

    specs = (P("tp"), P(None, None, "tp"), P(None, "tp"))
    shapes = (("bfloat16", rows, K), ("bfloat16", LAYERS, K, features))
    shapes += (("bfloat16", LAYERS, features, K),)
    return compiled(jax.grad(loss, (1, 2)), mesh, specs, specs[1:], *shapes)


def test_a_scan_over_layers_runs_every_call_once(mesh):
    text = compiled_scan(mesh, M, N)
    forward = ["all_gather_matmul", "matmul_reduce_scatter"]
    row = ["all_gather_matmul", "wgrad"]
    column = ["bulk_all_gather", "bulk_reduce_scatter"]
    assert calls(text) == sorted(forward + row + column)


def test_a_scan_that_accumulates_gradients_does_not_save_kernels(mesh):
    def layer(x, kernel):
        w, main_grad = kernel
        return jax.nn.relu(ub.linear(x, w, main_grad=main_grad)), None

    def loss(main_grads, x, w):
        return jnp.sum(jax.lax.scan(layer, x, (w, main_grads))[0].astype(jnp.float32))

    shapes = (("float32", LAYERS, K, K), ("bfloat16", M, K), ("bfloat16", LAYERS, K, K))
    specs = (P(), P(), P())
    text = compiled(jax.grad(loss), mesh, specs, P(), *shapes)
    (forward, backward) = re.findall(r" = (\(.*?\)) while\(", text)
    kernels = f"bf16[{LAYERS},{K},{K}]"
    assert forward.count(kernels) == backward.count(kernels) == 1


def test_a_residual_that_its_norm_needs_too_is_not_copied(mesh):
    def loss(x, w, v):
        h = ub.all_gather_matmul(x / jnp.linalg.norm(x), w, axis_name="tp")
        y = ub.matmul_reduce_scatter(h, v, axis_name="tp", residual=x)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    shapes = (("bfloat16", M, K), ("bfloat16", K, N), ("bfloat16", N, K))
    text = compiled(jax.grad(loss, (0, 1, 2)), mesh, specs, specs, *shapes)
    assert not copies(text)


@pytest.mark.parametrize("options", [None, SLICES_IN_PLACE])
def test_microbatches_are_accumulated_in_place(mesh, options):
    def accumulate(x, dy, main_grad):
        def one(grad, batch):
            return ub.wgrad_accumulate(*batch, grad), None

        return jax.lax.scan(one, main_grad, (x, dy))[0]

    shapes = (("bfloat16", 4, M, K), ("bfloat16", 4, M, N), ("float32", K, N))
    specs = (P(), P(), P())
    text = compiled(accumulate, mesh, specs, P(), *shapes, donated=2, options=options)
    assert calls(text) == ["wgrad"]
    # Without the option, only operands are copied, which are bf16.
    assert not copies(text, r"\w+" if options else "f32")


@pytest.mark.parametrize("options", [None, SLICES_IN_PLACE])
def test_gradients_of_layers_are_accumulated_in_place(mesh, options):
    def loss(main_grads, x, w, v):
        g, h = main_grads
        y = ub.all_gather_matmul(x, w, axis_name="tp", main_grad=g)
        y = ub.matmul_reduce_scatter(y, v, axis_name="tp", main_grad=h)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def accumulate(x, w, v, *main_grads):
        def one(sums, x):
            return jax.grad(loss)(sums, x, w, v), None

        return jax.lax.scan(one, main_grads, x)[0]

    column, row = P(None, "tp"), P("tp")
    specs = (P(None, "tp"), column, row, column, row)
    shapes = (("bfloat16", 4, M, K), ("bfloat16", K, N), ("bfloat16", N, K))
    shapes += (("float32", K, N), ("float32", N, K))
    text = compiled(
        accumulate, mesh, specs, specs[3:], *shapes, donated=(3, 4), options=options
    )
    assert "matmul_reduce_scatter" in calls(text)
    assert not copies(text, r"\w+" if options else "f32")


def gathered_layers(mesh):
    """Compiles four layers whose kernels are sharded over "fsdp" and "tp"."""
    both = Mesh(mesh.devices.reshape(2, 2), ("fsdp", "tp"))

    def layer(x, w, v):
        w, v = (jax.lax.all_gather(one, "fsdp", axis=0, tiled=True) for one in (w, v))
        h = ub.all_gather_matmul(x, w, axis_name="tp")
        return ub.matmul_reduce_scatter(jax.nn.relu(h), v, axis_name="tp")

    def layers(x, *kernels):
        for w, v in zip(kernels[::2], kernels[1::2], strict=True):
            x = layer(x, w, v)
        return x

    rows = P(("fsdp", "tp"))
    specs = (rows, *4 * (P("fsdp", "tp"), P(("tp", "fsdp"))))
    shapes = len(specs) * (("bfloat16", 8192, 8192),)
    return compiled(layers, both, specs, rows, *shapes)


def order_of(text):
    """Returns the order of gathers' starts ("s") and ends ("d"), and of calls ("C")."""
    kinds = {"custom-call": "C", "all-gather-start": "s", "all-gather-done": "d"}
    found = re.findall(rf" ({'|'.join(kinds)})\(", text)
    return "".join(kinds[one] for one in found)


def test_xla_gathers_kernels_during_calls_whose_time_it_knows(mesh, monkeypatch):
    text = gathered_layers(mesh)
    latencies = re.findall(r'jax_ub\$(\w+)".*?latency_metadata="(\d+)"', text)
    sizes = (4096, 8192, 8192, 2, "bfloat16", HARDWARE["h100"])
    auto = MethodChoice(Method.AUTO)
    expected = [
        (op, str(round(1e9 * simulate.estimate(op, auto, *sizes).seconds)))
        for op in ("all_gather_matmul", "matmul_reduce_scatter")
    ]
    assert latencies == 4 * expected
    # The kernel of the next call is gathered during each call.
    assert order_of(text).count("sC") >= 7
    monkeypatch.setattr(simulate, "estimate_on_gpus", lambda *arguments: None)
    assert order_of(gathered_layers(mesh)).count("sC") < 4


def test_leading_batch_axes_copy_nothing(mesh):
    def loss(x, w, v):
        h = jax.nn.relu(ub.all_gather_matmul(x, w, axis_name="tp"))
        y = ub.matmul_reduce_scatter(h, v, axis_name="tp")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    specs = (P(None, None, "tp"), P(None, "tp"), P("tp"))
    shapes = (("bfloat16", 2, 3, M, K), ("bfloat16", K, N), ("bfloat16", N, K))
    text = compiled(jax.grad(loss, (0, 1, 2)), mesh, specs, specs, *shapes)
    assert not copies(text)
    assert not re.findall(r" (transpose|all-\w+|reduce-scatter)\(", text)


def test_an_embedding_that_projects_too_is_not_transposed(mesh):
    def loss(x, embedding):
        y = ub.all_gather_matmul(x, embedding, axis_name="tp", rhs_transposed=True)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    specs = (P("tp"), P("tp"))
    shapes = (("bfloat16", M, K), ("bfloat16", N, K))
    text = compiled(jax.grad(loss, (0, 1)), mesh, specs, specs, *shapes)
    assert calls(text) == ["all_gather_matmul", "matmul_reduce_scatter", "wgrad"]
    assert not copies(text)
    assert " transpose(" not in text


def test_gathered_operands_take_no_memory(mesh):
    def column(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    specs = (P("tp"), P(None, "tp"))
    shapes = (("bfloat16", 64 * M, 4 * K), ("bfloat16", 4 * K, N))
    program = lowered(column, mesh, specs, specs[1], *shapes).compile()
    workspaces = 2 * 32 * 2**20 + 4096
    assert workspaces < 64 * M * 4 * K * 2
    assert program.memory_analysis().temp_size_in_bytes <= workspaces


def test_a_call_is_captured(mesh, tmp_path):
    def column(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    specs = (P("tp"), P(None, "tp"))
    shapes = (("bfloat16", M, K), ("bfloat16", K, N))
    lowered(column, mesh, specs, specs[1], *shapes).compile(
        {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    )
    (path,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    kinds = re.findall(r": (k\w+)", path.read_text())
    assert kinds == ["kCommandBuffer", "kCustomCall"]


def test_a_call_of_an_exported_program_is_captured_with_its_partition(mesh, tmp_path):
    def column(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    specs = (P("tp"), P(None, "tp"))
    mapped = jax.shard_map(column, mesh=mesh, in_specs=specs, out_specs=specs[1])
    operands = [
        jax.ShapeDtypeStruct(sizes, "bfloat16", sharding=NamedSharding(mesh, spec))
        for spec, sizes in zip(specs, ((M, K), (K, N)), strict=True)
    ]
    export = jax.export.export(
        jax.jit(mapped), platforms=["cuda"], disabled_checks=ub.export_safety_checks
    )
    program = jax.jit(export(*operands).call).lower(*operands)
    text = program.compile(
        {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    ).as_text()
    (partition,) = re.findall(r"%([\w.\-]+) = u32\[\]\S* partition-id\(\)", text)
    (passed,) = re.findall(r"custom-call\((.*?)\).*jax_ub\$all_gather_matmul", text)
    assert passed.endswith(f"%{partition}")
    (path,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    kinds = re.findall(r": (k\w+)", path.read_text())
    assert kinds == ["kCommandBuffer", "kPartitionId", "kCustomCall"]


@pytest.fixture
def transformer():
    """Returns a transformer layer's state, specs, and loss on one rank's shards."""
    model = TransformerLayer(
        K,
        N,
        8,
        num_gqa_groups=4,
        rotary_base=1e4,
        activation="swiglu",
        normalization="RMSNorm",
        use_bias=False,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(model)

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32) ** 2)

    return state, nnx.get_partition_spec(state), loss


def test_a_transformer_layer_communicates_only_in_its_calls(mesh, transformer):
    state, layouts, loss = transformer
    specs = (layouts, P(None, "tp"))
    mapped = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs
    )
    x = jax.ShapeDtypeStruct((2, M, K), jnp.bfloat16)
    operands = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
        ),
        (state, x),
        specs,
    )
    text = jax.jit(mapped).lower(*operands).compile().as_text()
    forward = ["all_gather_matmul", "matmul_reduce_scatter"]
    row = ["all_gather_matmul", "wgrad"]
    column = ["bulk_all_gather", "bulk_reduce_scatter"]
    assert calls(text) == sorted(2 * (forward + row + column))
    assert not copies(text)
    # The gradients of the norms' scales are summed, because scales are replicated.
    assert not re.findall(r" (all-gather|all-to-all|reduce-scatter)[\w-]*\(", text)


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_a_layer_on_one_rank_is_three_gemms_of_xla(mesh, parallel):
    def loss(x, w):
        y = ub.linear(x, w, parallel=parallel, axis_name="tp")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    one = Mesh(mesh.devices[:1], ("tp",))
    column = (P("tp"), P(None, "tp"))
    specs = column if parallel == "column" else (P(None, "tp"), P("tp"))
    shapes = (("bfloat16", M, K), ("bfloat16", K, N))
    text = compiled(jax.grad(loss, (0, 1)), one, specs, specs, *shapes)
    assert not calls(text)
    assert not re.search(r"(all-gather|all-reduce|reduce-scatter)[-a-z]*\(", text)
    products = re.findall(r"__cublas\$|__triton_(?:nested_)?gemm|__gemm_fusion", text)
    assert len(re.findall(r" dot\(", text)) + len(products) >= 3


@pytest.fixture
def all_gpus(mesh, monkeypatch):
    """Makes JAX report the GPUs of the mesh as all its devices, and returns them."""
    devices = [*mesh.devices]
    monkeypatch.setattr(jax, "devices", lambda *arguments: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    monkeypatch.setattr(jax, "local_device_count", lambda: len(devices))
    monkeypatch.setattr(Ranks, "devices", devices)
    return devices


def check_kernels(text, number):
    targets = re.findall(r'custom_call_target="(mosaic_gpu[^"]*)"', text)
    assert len(targets) == number
    assert not re.search(r"all-gather|collective-permute", text)


def test_the_kernel_of_jax_that_bench_times_compiles(mesh, all_gpus):
    shape = Shape(4 * M, K, 8 * N)
    found = pallas_programs(shape, "bfloat16", Ranks(4))
    if jax.__version_info__ < (0, 11, 2):
        assert "without a barrier between the GPUs" in found
        return
    assert list(found) == list(PALLAS_TILES)
    specs = (P("tp"), P(None, "tp"))
    shapes = (("bfloat16", 4 * M, K), ("bfloat16", K, 8 * N))
    for program in [*found.values()][::2]:  # one of each tile
        program = lowered(program, mesh, specs, specs[1], *shapes)
    text = program.compile().as_text()
    check_kernels(text, 1)
    assert len(re.findall("custom_call_target", text)) == 1


has_barrier = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="this jax runs the kernel without a barrier between the GPUs",
)


@has_barrier
def test_xla_runs_no_collective_during_the_kernel_of_jax_with_a_flag(mesh, all_gpus):
    shape = Shape(4 * M, K, 8 * N)
    run, *_ = pallas_programs(shape, "bfloat16", Ranks(4)).values()

    def with_sum(x, w, a):
        return run(x, w), jax.lax.psum(a, "tp")

    column = P(None, "tp")
    specs = (P("tp"), column, P("tp"))
    shapes = (("bfloat16", 4 * M, K), ("bfloat16", K, 8 * N), ("float32", 2**22))
    program = lowered(with_sum, mesh, specs, (column, P()), *shapes)
    during = r"all-reduce-start\(.*mosaic_gpu.*all-reduce-done\("
    assert re.search(during, program.compile().as_text(), re.DOTALL)
    name, value = settings.COLLECTIVES_IN_ORDER.removeprefix("--").split("=")
    text = program.compile({name: value}).as_text()
    assert "all-reduce(" in text and "all-reduce-start(" not in text


@has_barrier
def test_layers_compile_with_the_kernel_that_a_tuned_file_chose(
    mesh, all_gpus, tmp_path, monkeypatch
):
    sizes = TunedKey("all_gather_matmul", 4, 4 * M, K, 8 * N, "bfloat16")
    choice = MethodChoice(Method.PIPELINE, pallas=PALLAS_TILES[0])
    tuned_file.write(tmp_path / "t.json", {environment(): {sizes: (choice, {})}})
    monkeypatch.setenv("JAX_UB_TUNED", str(tmp_path / "t.json"))
    monkeypatch.setenv("XLA_FLAGS", settings.COLLECTIVES_IN_ORDER)
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)

    ub.fallbacks(clear=True)
    text = compiled_scan(mesh, 4 * M, 8 * N)
    check_kernels(text, 1)
    forward, row = ["matmul_reduce_scatter"], ["all_gather_matmul", "wgrad"]
    column = ["bulk_all_gather", "bulk_reduce_scatter"]
    assert calls(text) == sorted(forward + row + column)
    # The backward pass of the row layer gathers dy, and its kernel is transposed.
    assert {one.label for one in ub.fallbacks()} == {"matmul_reduce_scatter"}
