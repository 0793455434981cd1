"""The primitives that quantize, in the engine and in XLA."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import devices, pairs_of_parts

from jax_ub._src import scaled_array
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives import quantization
from jax_ub._src.primitives.call import Execution

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
EXECUTION = Execution(label="test", choice=MethodChoice(Method.AUTO))
# Shapes with the shapes of their scales.
LAYOUTS = [
    ((7,), (1,)),
    ((1, 1), (1, 1)),
    ((5, 1), (5, 1)),
    ((33, 70), (1, 1)),
    ((33, 70), (33, 1)),
    ((33, 70), (1, 70)),
    ((64, 96), (64, 3)),
    ((64, 96), (2, 96)),
    ((2, 3, 64), (2, 3, 1)),
    ((2, 3, 64), (2, 1, 64)),
    ((2, 3, 64), (1, 3, 64)),
    ((700, 900), (1, 1)),
    ((700, 900), (1, 900)),
    ((704, 900), (22, 900)),
]


def numbers(shape, dtype, seed=0):
    """Returns numbers of all magnitudes, with zeros, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))
    specials = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], shape)
    x = np.where(rng.uniform(size=shape) < 0.02, specials, x)
    largest = float(jnp.finfo(dtype).max)
    return jnp.asarray(np.where(np.abs(x) < largest, x, specials), dtype)


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    for part, wanted in pairs_of_parts(found, expected):
        np.testing.assert_array_equal(bits(part), bits(wanted))


def mesh_of(kind, **shape):
    """Returns a mesh with axes of this kind, for example `tp=4`."""
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(kind,) * len(shape),
        devices=devices(math.prod(shape.values())),
    )


def amaxes(module, *execution, x, scales):
    """Returns the maxima of the elements that share each of the scales."""
    if scales_are_of_blocks(x.shape, scales):
        axis = next(i for i, n in enumerate(scales) if n != x.shape[i])
        return module.amax_of_blocks(*execution, x, axis)
    axes = tuple(i for i, n in enumerate(scales) if n != x.shape[i])
    return module.amax_of(*execution, x, axes or None)


def scales_are_of_blocks(shape, scales):
    return any(1 < n < size for n, size in zip(scales, shape, strict=True))


def scales_of(x, shape):
    """Returns scales of this shape that fit to x."""
    amax = amaxes(scaled_array, x=x, scales=shape)
    if scales_are_of_blocks(x.shape, shape):
        return scaled_array.block_scales(amax, E4M3)
    return jnp.where(jnp.isfinite(amax) & (amax > 0), amax / 448, 1.0)


@covering(layout=LAYOUTS, dtype=["float32", "bfloat16", "float16"], fp8=[E4M3, E5M2])
def test_the_engine_has_the_results_of_the_formulas(layout, dtype, fp8):
    shape, scales_shape = layout
    x = numbers(shape, dtype)
    found = jax.jit(
        lambda x: amaxes(quantization, EXECUTION, x=x, scales=scales_shape)
    )(x)
    same_bits(found, amaxes(scaled_array, x=x, scales=scales_shape))
    scales = scales_of(x, scales_shape)
    cast = jax.jit(lambda x, s: quantization.cast(EXECUTION, x, s, fp8))
    same_bits(cast(x, scales), scaled_array.cast(x, scales, fp8))


@pytest.mark.parametrize("mapped", ["x", "scales", "both"])
@pytest.mark.parametrize("scales_shape", [(1, 1), (6, 1), (1, 32)])
def test_vmap(mapped, scales_shape):
    x = numbers((4, 6, 32), "float32")
    scales = scales_of(x, (4, *scales_shape))
    x = x[0] if mapped == "scales" else x
    scales = scales[0] if mapped == "x" else scales
    in_axes = (None if mapped == "scales" else 0, None if mapped == "x" else 0)

    def cast(x, scales):
        return quantization.cast(EXECUTION, x, scales, E4M3)

    found = jax.vmap(cast, in_axes)(x, scales)
    for i in range(4):
        one = x if mapped == "scales" else x[i]
        its = scales if mapped == "x" else scales[i]
        same_bits(found[i], scaled_array.cast(one, its, E4M3))
    if mapped == "x":
        found = jax.vmap(lambda x: quantization.amax_of(EXECUTION, x), 1)(x)
        same_bits(found[2], scaled_array.amax_of(x[:, 2]))


def test_vmap_quantizes_an_unmapped_array_once():
    x = numbers((6, 32), "float32")
    for function in (
        quantized,
        lambda x: quantization.amax_of_blocks(EXECUTION, x, 1),
    ):
        found = jax.vmap(function, None, None, axis_size=4)(x)
        same_bits(found, function(x))


def quantized(x, execution=EXECUTION):
    amax = quantization.amax_of(execution, x)
    return quantization.cast(execution, x, amax / 448, E4M3)


def runs_in_engine(lowered):
    calls = [f"@jax_ub.{name}(" in lowered.as_text() for name in ("amax", "cast")]
    assert calls[0] == calls[1]
    return calls[0]


def test_one_cpu_device_runs_the_engine_and_gpus_run_xla():
    traced = jax.jit(quantized).trace(jnp.ones((8, 32)))
    assert runs_in_engine(traced.lower(lowering_platforms=("cpu",)))
    for platforms in ("cuda",), ("cpu", "cuda"):
        lowered = traced.lower(lowering_platforms=platforms)
        assert not runs_in_engine(lowered)
        assert "tensor<8x32xf32>) -> tensor<8x32xf8E4M3FN>" in lowered.as_text()


@pytest.mark.parametrize("check_vma", [False, True])
def test_each_rank_of_a_shard_map_runs_the_engine(check_vma):
    mesh = mesh_of(AxisType.Auto, tp=4)
    x = numbers((8, 64), "float32", seed=1)
    x = jnp.where(jnp.isfinite(x), x, 1.0)
    step = jax.jit(
        jax.shard_map(
            quantized,
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
            check_vma=check_vma,
        )
    )
    assert runs_in_engine(step.lower(x))
    expected = [
        scaled_array.cast(rows, scaled_array.amax_of(rows) / 448, E4M3)
        for rows in jnp.split(x, 4)
    ]
    same_bits(step(x), jnp.concatenate(expected))


def of_several_devices():
    mesh = mesh_of(AxisType.Auto, tp=4)
    return jax.jit(quantized, in_shardings=jax.NamedSharding(mesh, P("tp")))


def with_an_automatic_axis():
    mesh = mesh_of(AxisType.Auto, dp=2, tp=2)

    def step(x):
        return jax.shard_map(
            quantized, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"}
        )(x)

    return jax.jit(step, in_shardings=jax.NamedSharding(mesh, P("dp")))


def with_method_xla():
    plain = Execution(label="test", choice=MethodChoice(Method.XLA))
    return jax.jit(lambda x: quantized(x, plain))


@pytest.mark.parametrize(
    "step", [of_several_devices, with_an_automatic_axis, with_method_xla]
)
def test_xla_runs_what_the_engine_cannot(step):
    x = jnp.arange(1.0, 257).reshape(8, 32)
    step = step()
    assert not runs_in_engine(step.lower(x))
    same_bits(step(x), scaled_array.cast(x, jnp.full((1, 1), 256 / 448), E4M3))


def test_an_array_on_an_explicit_mesh_keeps_its_sharding():
    mesh = mesh_of(AxisType.Explicit, tp=4)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(1.0, 257).reshape(8, 32), P("tp"))
        found = jax.jit(quantized)(x)
    assert jax.typeof(found).sharding.spec == P("tp", None)
    same_bits(found, scaled_array.cast(x, jnp.full((1, 1), 256 / 448), E4M3))


@pytest.mark.parametrize("is_jitted", [True, False])
def test_vmap_over_an_explicit_mesh_axis_keeps_the_sharding(is_jitted):
    mesh = mesh_of(AxisType.Explicit, dp=4)
    x = np.arange(1.0, 257, dtype="float32").reshape(4, 2, 32)

    def both(x):
        return quantized(x), quantization.amax_of_blocks(EXECUTION, x, 1)

    function = jax.jit(jax.vmap(both)) if is_jitted else jax.vmap(both)
    with jax.set_mesh(mesh):
        found = function(jax.device_put(x, P("dp")))
    for array, expected in zip(found, jax.vmap(both)(x), strict=True):
        assert jax.typeof(array).sharding.spec == P("dp", None, None)
        same_bits(array, expected)


def test_exported_programs_need_no_engine():
    x = jnp.arange(1.0, 257).reshape(8, 32)
    program = jax.export.export(jax.jit(quantized))(x)
    assert "@jax_ub" not in program.mlir_module()
    same_bits(program.call(x), quantized(x))
    sizes = jax.export.symbolic_shape("m, 32")
    program = jax.export.export(jax.jit(quantized))(
        jax.ShapeDtypeStruct(sizes, x.dtype)
    )
    same_bits(program.call(x), quantized(x))


def test_there_is_no_gradient():
    gradient = jax.grad(lambda x: quantization.amax_of(EXECUTION, x)[0, 0] * x[1, 2])
    found = gradient(jnp.full((4, 4), 3.0))
    np.testing.assert_array_equal(found, jnp.zeros((4, 4)).at[1, 2].set(3))


# After a long cast, XLA continues a rank's program on the thread that completes the
# cast, and waits there for the other ranks, whose casts need threads, too.
_WAITING_RANKS = """
import jax, jax.numpy as jnp
import jax_ub as ub

mesh = jax.make_mesh((8,), ("tp",))
sharding = jax.NamedSharding(mesh, jax.P("tp"))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P("tp"),) * 2, out_specs=jax.P("tp"))
def step(x, w):
    w = ub.quantize(w, axis_name="tp", role="kernel")
    x = ub.quantize(x, axis_name="tp")
    gathered = jax.lax.all_gather(x.values, "tp", tiled=True)
    total = w.values.astype("float32").sum()
    return gathered.astype("float32").sum(1, keepdims=True) + total

x = jax.device_put(jnp.ones((8 * 512, 1024), "bfloat16"), sharding)
w = jax.device_put(jnp.ones((8 * 1024, 352), "bfloat16"), sharding)
for _ in range(40):
    y = step(x, w)
print(jax.block_until_ready(y).shape)
"""


def test_ranks_may_wait_for_each_other_after_a_long_cast():
    done = subprocess.run(
        [sys.executable, "-c", _WAITING_RANKS],
        env={**os.environ, "NPROC": "32", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "(32768, 1)\n"
