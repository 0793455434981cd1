"""FP8 programs lowered for CUDA devices, which needs no GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from cuda_programs import (
    attribute,
    called,
    collectives,
    cuda_text,
    custom_calls,
    shape,
)
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.rules import forward
from jax_ub._src.runtime import cuda_engine
from jax_ub.errors import UnsupportedOverlapError

CURRENT = ub.fp8.Float8CurrentScaling()
SPECS = {
    "column": ((P("tp"), P(None, "tp")), P(None, "tp")),
    "row": ((P(None, "tp"), P("tp")), P("tp")),
}


def lower_for(monkeypatch, *capability):
    monkeypatch.setattr(
        cuda_engine, "_compute_capabilities", lambda devices: [capability]
    )


def layer(parallel, fp8=CURRENT, **options):
    def run(x, w):
        return ub.linear(x, w, parallel=parallel, axis_name="tp", fp8=fp8, **options)

    return on_ranks(run, tp_mesh(2), *SPECS[parallel])


def operands(tokens=32, inputs=64, outputs=96):
    return (
        shape(tokens, inputs, dtype=jnp.bfloat16),
        shape(inputs, outputs, dtype=jnp.bfloat16),
    )


def trained(parallel, **options):
    run = layer(parallel, **options)
    return jax.jit(jax.grad(lambda x, w: jnp.sum(run(x, w) ** 2), argnums=(0, 1)))


@pytest.mark.parametrize("parallel", SPECS)
@pytest.mark.parametrize("method", ["ring_exchange", "pipeline", "external"])
def test_all_passes_multiply_fp8_and_only_the_scales_are_reduced(
    engine, parallel, method
):
    text = cuda_text(trained(parallel, method=method), *operands())
    calls = custom_calls(text)
    assert len(calls) >= 3
    for name, call in calls:
        if name != "all_gather":
            assert attribute(call, "has_scales") == 1
    # One for the scales of x and w, one for that of the gradient of the result.
    assert collectives(text) == {"all_reduce": 2}


def test_bulk_calls_multiply_fp8(engine, monkeypatch):
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    # The name gives a trace that no other test has left.
    step = trained("column", ub_name="bulk")
    calls = dict(custom_calls(cuda_text(step, *operands())))
    assert set(calls) == {"all_gather_matmul", "bulk_all_gather", "bulk_reduce_scatter"}
    for call in calls.values():
        assert attribute(call, "has_scales") == 1


@pytest.mark.parametrize("parallel", SPECS)
def test_kernels_are_transposed_where_the_gpu_needs_it(engine, parallel, monkeypatch):
    transposed = r"stablehlo.transpose .*f8E4M3FN"
    for capability, needs_it in (((9, 0), True), ((10, 0), False), ((12, 0), True)):
        lower_for(monkeypatch, *capability)
        text = cuda_text(layer(parallel), *operands())
        ((_, call),) = custom_calls(text)
        assert attribute(call, "rhs_transposed") == needs_it
        assert attribute(call, "transposes_fp8") == needs_it
        assert len(re.findall(transposed, text)) == needs_it


def test_the_engine_gets_the_scales_and_the_transposed_kernel(engine):
    cuda_text(layer("column"), *operands())
    ((_, attributes, arrays, results),) = engine.asked
    assert arrays == [
        ("float8_e4m3fn", (16, 64)),
        ("float8_e4m3fn", (48, 64)),
        ("float32", (1,)),
        ("float32", (1,)),
    ]
    assert results == [("bfloat16", (32, 48))]
    assert attributes["has_scales"] == 1


def test_gpus_sum_precisely_where_fast_accumulation_is_allowed(engine):
    fast = ub.fp8.MMParams(use_split_accumulator=False)
    recipe = ub.fp8.Float8CurrentScaling(fp8_gemm_dgrad=fast, fp8_gemm_wgrad=fast)
    text = cuda_text(trained("column", fp8=recipe), *operands())
    assert text == cuda_text(trained("column"), *operands())


def refused(match, fp8=CURRENT, **sizes):
    """Asserts that a named method raises an error, and that "auto" falls back."""
    with pytest.raises(UnsupportedOverlapError, match=match):
        cuda_text(layer("column", fp8, method="pipeline"), *operands(**sizes))
    assert not called(cuda_text(layer("column", fp8), *operands(**sizes)))
    assert re.search(match, f"cannot run: {ub.fallbacks()[-1].reason}")


@pytest.mark.parametrize("sizes", [{"inputs": 72}, {"outputs": 80}])
def test_sizes_that_are_no_multiples_of_16_are_refused(engine, sizes):
    refused(r"cannot run: one of its GEMMs has size \d+, and FP8 on GPUs", **sizes)


def test_any_number_of_tokens_is_multiplied_but_not_contracted(engine):
    sizes = operands(tokens=6)
    assert called(cuda_text(layer("column"), *sizes)) == {"all_gather_matmul": 1}
    with pytest.raises(UnsupportedOverlapError, match="one of its GEMMs has size 6"):
        cuda_text(trained("column", method="ring_exchange"), *sizes)


@pytest.fixture
def rules(engine):
    """Gives the stand-in the rules of the real engine."""
    real = pytest.importorskip("jax_ub._cuda")
    engine.why_no_fp8 = real.why_no_fp8
    engine.needs_contiguous_fp8 = real.needs_contiguous_fp8
    engine.workspace_bytes = real.workspace_bytes
    assert engine.fp8_multiple == real.fp8_multiple


def test_gpus_without_fp8_are_refused(rules, monkeypatch):
    lower_for(monkeypatch, 8, 0)
    refused("FP8 needs a GPU of compute capability 8.9 or newer; this is 8.0")
    lower_for(monkeypatch, 8, 9)
    assert called(cuda_text(layer("column"), *operands())) == {"all_gather_matmul": 1}


ROWWISE = ub.fp8.RowwiseScaling()


MXFP8 = ub.fp8.MXFP8BlockScaling()


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_scales_of_blocks_are_refused_before_and_after_blackwell(
    rules, monkeypatch, capability
):
    lower_for(monkeypatch, *capability)
    match = "MXFP8 needs a GPU of compute capability 10.x or 11.0 and cuBLASLt 12.9; "
    refused(f"{match}this is {capability[0]}.0", MXFP8)


@covering(
    2,
    parallel=SPECS,
    method=["ring_exchange", "pipeline", "external"],
    recipe=[MXFP8, ROWWISE],
)
def test_all_passes_multiply_scales_of_rows_and_blocks(
    rules, monkeypatch, parallel, method, recipe
):
    capability = (10, 0) if recipe is MXFP8 else (9, 0)
    lower_for(monkeypatch, *capability)
    step = trained(parallel, fp8=recipe, method=method)
    text = cuda_text(step, *operands(outputs=64))
    calls = custom_calls(text)
    assert len(calls) >= 3
    for name, call in calls:
        if name != "all_gather":
            assert attribute(call, "has_row_scales") == 1
    assert not collectives(text)


@pytest.mark.parametrize(
    ("recipe", "capability", "dy_scales", "w_scales"),
    [
        (MXFP8, (10, 0), "32x2xf8E8M0FNU", "64x2xf8E8M0FNU"),
        (ROWWISE, (9, 0), "32x1xf32", "64x1xf32"),
    ],
    ids=["blocks", "rows"],
)
def test_kernels_are_converted_once_for_the_gradient_of_x(
    rules, monkeypatch, recipe, capability, dy_scales, w_scales
):
    lower_for(monkeypatch, *capability)
    step = trained("row", fp8=recipe, method="ring_exchange")
    calls = dict(custom_calls(cuda_text(step, *operands(64, 128, 64))))
    # dy [32, 64] is gathered and multiplied by w [64, 64], which contracts N.
    shapes = re.search(r": \((.*)\) -> ", calls["all_gather_matmul"])[1]
    assert shapes == ", ".join(
        f"tensor<{text}>"
        for text in ("32x64xf8E4M3FN", "64x64xf8E4M3FN", dy_scales, w_scales)
    )


def test_all_reduced_products_multiply_scales_of_blocks(rules, monkeypatch):
    lower_for(monkeypatch, 10, 3)
    specs = (P(None, "tp"), P("tp")), P()
    run = functools.partial(ub.matmul_all_reduce, axis_name="tp", fp8=MXFP8)
    text = cuda_text(on_ranks(run, tp_mesh(2), *specs), *operands(outputs=64))
    ((name, call),) = custom_calls(text)
    assert name == "matmul_all_reduce"
    assert attribute(call, "has_row_scales") == 1


def test_whole_blocks_of_tokens_are_contracted(rules, monkeypatch):
    lower_for(monkeypatch, 10, 0)
    sizes = operands(tokens=48, outputs=64)
    match = "MXFP8 on GPUs contracts multiples of 32 rows or features, and 48 is none"
    with pytest.raises(UnsupportedOverlapError, match=match):
        cuda_text(trained("column", fp8=MXFP8, method="ring_exchange"), *sizes)


def test_scales_of_rows_run_on_hopper_only(rules, monkeypatch):
    lower_for(monkeypatch, 10, 0)
    match = "row scales need a GPU of compute capability 9.0 and cuBLASLt 12.9; this is"
    refused(f"{match} 10.0. Use a recipe with one scale per tensor", ROWWISE)
    lower_for(monkeypatch, 9, 0)
    ((_, call),) = custom_calls(cuda_text(layer("column", ROWWISE), *operands()))
    assert attribute(call, "has_row_scales") == 1


def test_fp8_rows_are_not_multiplied_by_a_wide_kernel(rules, monkeypatch):
    monkeypatch.setattr(forward, "_sends_fp8", lambda execution, x: True)
    refused("cannot run: cuBLASLt does not multiply FP8 by bfloat16", None)


def test_what_the_engine_rejects_is_a_reason(rules, engine, monkeypatch):
    def workspace_bytes(*arguments):
        raise NotImplementedError("scales that cuBLASLt does not multiply")

    monkeypatch.setattr(engine, "workspace_bytes", workspace_bytes)
    refused("cannot run: scales that cuBLASLt does not multiply", ROWWISE)


def test_the_capabilities_of_gpus_are_read_or_assumed(rules):
    class Gpu:
        def __init__(self, text):
            self.compute_capability = text

    needs = cuda_engine.needs_contiguous_fp8
    assert needs([Gpu("8.9")]) and needs([Gpu("9.0")]) and needs([Gpu("12.1")])
    assert not needs([Gpu("10.0"), Gpu("10.3")]) and not needs([Gpu("11.0")])
    assert needs([Gpu("10.0"), Gpu("12.0")])  # a program runs on all of them
    assert needs(jax.devices("cpu")) and needs([])  # as on an H100
