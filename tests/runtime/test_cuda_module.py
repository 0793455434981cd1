"""The functions of `jax_ub._cuda` without a GPU."""

import pytest
from cuda_programs import attribute, cuda_text, custom_calls, shape
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.methods import Method
from jax_ub._src.runtime import cpu_engine, cuda_engine

native = pytest.importorskip("jax_ub._cuda", reason="built without nvcc")

# The bytes of cuBLASLt's workspace on each GEMM stream, and the bytes that alignment
# may cost.
SCRATCH, SLACK = 32 << 20, 256
F32, BF16 = "float32", "bfloat16"
PLACE = {
    "num_ranks": 4,
    "num_splits": 0,
    "ranks": [0, 1, 2, 3],
    "label": "test",
    "channel": "",
}
SUMMED = {
    "num_pairs": 1,
    "rhs_transposed": 0,
    "has_bias": 0,
    "has_residual": 0,
    "scale": 1.0,
}
GATHERED = {**SUMMED, "num_kernels": 1, "return_gathered": 0}


def workspace(op, method, operands, results, options=None, **changes):
    attributes = {**PLACE, "method": method.code, **(options or {}), **changes}
    return native.workspace_bytes(op, attributes, operands, results)


def row(dtype, num_pairs=1):
    xs = [(dtype, (800, 4))] * num_pairs
    ws = [(dtype, (4, 80))] * num_pairs
    return [*xs, *ws]


def test_a_local_gemm_needs_its_scratch():
    results = [(BF16, (800, 80))]
    size = workspace("matmul", Method.DIRECT, row(BF16), results, SUMMED)
    assert size == SCRATCH + SLACK


@pytest.mark.parametrize(
    ("dtype", "num_pairs", "partial_bytes"), [(BF16, 1, 2), (BF16, 2, 4), (F32, 1, 4)]
)
def test_partial_sums_are_stored_until_they_are_sent(dtype, num_pairs, partial_bytes):
    """A single product is sent in the dtype of x, a sum of several products in f32."""
    size = workspace(
        "matmul_reduce_scatter",
        Method.RING_EXCHANGE,
        row(dtype, num_pairs),
        [(dtype, (200, 80))],
        {**SUMMED, "num_pairs": num_pairs},
    )
    assert size == 2 * SCRATCH + 800 * 80 * partial_bytes + SLACK


def test_gathered_rows_need_no_workspace():
    operands = [(BF16, (200, 4)), (BF16, (4, 80))]
    results = [(BF16, (800, 80)), (BF16, (800, 4))]
    size = workspace(
        "all_gather_matmul",
        Method.PIPELINE,
        operands,
        results,
        GATHERED,
        return_gathered=1,
    )
    assert size == 2 * SCRATCH + SLACK


def test_a_wgrad_gathers_into_its_workspace():
    operands = [(BF16, (200, 4)), (BF16, (800, 80))]
    options = {"num_outputs": 1, "accumulate": 0, "gather": 1, "scale": 1.0}
    size = workspace("wgrad", Method.PIPELINE, operands, [(BF16, (4, 80))], options)
    assert size == SCRATCH + 800 * 4 * 2 + SLACK


def test_every_gemm_stream_has_its_own_scratch():
    operands, results = row(F32), [(F32, (200, 80))]
    op, method = "matmul_reduce_scatter", Method.RING_EXCHANGE
    one, three = (
        workspace(op, method, operands, results, SUMMED, num_lanes=n) for n in (1, 3)
    )
    assert three - one == 2 * SCRATCH


def test_a_collective_needs_no_workspace():
    operands, results = [(BF16, (800, 4))], [(BF16, (200, 4))]
    assert workspace("reduce_scatter", Method.RING_EXCHANGE, operands, results) == 0


def test_an_invalid_call_is_an_error_with_the_reason():
    operands, results = row(F32), [(F32, (200, 80))]
    where = ("matmul_reduce_scatter", Method.RING_EXCHANGE, operands)
    with pytest.raises(ValueError, match="jax_ub has no op 'matmal'"):
        workspace("matmal", *where[1:], results, SUMMED)
    with pytest.raises(ValueError, match="attribute num_pairs: missing, or of another"):
        workspace(*where, results, {})
    with pytest.raises(ValueError, match="attribute num_lanes is 9, expected 1 to 8"):
        workspace(*where, results, SUMMED, num_lanes=9)
    with pytest.raises(ValueError, match="gemm_algorithm is 8, expected 0 to 7"):
        workspace(*where, results, SUMMED, gemm_algorithm=8)
    with pytest.raises(ValueError, match="int32 is none of float32, bfloat16, "):
        workspace(*where, [("int32", (200, 80))], SUMMED)
    with pytest.raises(RuntimeError, match=r"y is f32\[100, 80\], expected f32"):
        workspace(*where, [(F32, (100, 80))], SUMMED)


def test_the_cuda_handlers_have_one_more_stage_than_the_cpus():
    targets = native.targets(has_several_devices=False)
    assert set(targets) == set(cpu_engine.load().targets())
    assert {frozenset(stages) for stages in targets.values()} == {
        frozenset(("instantiate", "initialize", "execute"))
    }
    assert set(native.call_site_type()) == {"type_id", "type_info"}
    assert tuple(native.xla_ffi_api_version) == cpu_engine.load().xla_ffi_api_version


def test_the_largest_group_is_that_of_the_engine():
    assert native.max_ranks == cuda_engine.MOST_RANKS


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_an_invalid_timeout_is_rejected(timeout_s):
    with pytest.raises(ValueError, match="expected more than 0"):
        native.set_timeout_s(timeout_s)


def test_without_a_driver_every_function_reports_the_reason():
    reason = native.why_not()
    if reason is None:
        pytest.skip("there is a GPU here")
    for ask in (
        native.driver_version,
        native.devices,
        native.counters,
        native.release_in_process,
        lambda: native.peers([0]),
        lambda: native.set_local_devices({0: 0}),
        lambda: native.endpoint([0], 1 << 20, "here"),
        lambda: native.connect_in_process(
            name="test", devices=[0, 1], ordinals=[0, 1], slots_bytes=1 << 20
        ),
    ):
        with pytest.raises(NotImplementedError) as error:
            ask()
        assert str(error.value) in reason


def test_groups_that_do_not_match_the_devices_are_rejected():
    with pytest.raises(ValueError, match="2 devices and 1 ordinals: expected one of"):
        native.connect_in_process(
            name="test", devices=[0, 1], ordinals=[0], slots_bytes=1 << 20
        )


def test_a_lowered_program_has_the_workspace_that_the_engine_needs():
    if cuda_engine.why_not() is not None:
        pytest.skip(cuda_engine.why_not())
    run = on_ranks(
        lambda x, w: ub.matmul_reduce_scatter(x, w, axis_name="tp"),
        tp_mesh(4),
        (P(None, "tp"), P("tp")),
        P("tp"),
    )
    text = cuda_text(run, shape(800, 16, dtype=BF16), shape(16, 80, dtype=BF16))
    ((name, call),) = custom_calls(text)
    size = 2 * SCRATCH + 800 * 80 * 2 + SLACK
    assert f"tensor<{size}xui8>" in call
    assert attribute(call, "method") == Method.RING_EXCHANGE.code
