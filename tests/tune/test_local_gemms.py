"""Tests the tuning of GEMMs without communication, and which calls use it."""

import functools

import jax
import pytest
from cuda_programs import attribute, cuda_text, custom_calls, shape
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import calls, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.methods import KernelOptions, Method, MethodChoice
from jax_ub._src.runtime import cuda_engine, tuned_file
from jax_ub._src.runtime.tuned_file import (
    COLUMN_GRADIENTS,
    LOCAL_OPS,
    OPS,
    TunedKey,
    environment,
)
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.explain.program import equations
from jax_ub._src.tools.tune.cases import candidates, cases, function, programs
from jax_ub._src.tools.tune.command import measure

M, K, N = 16, 8, 12
SECOND = MethodChoice(Method.DIRECT, kernel_options=KernelOptions(gemm_algorithm=1))


@pytest.fixture
def file_of(tmp_path, monkeypatch):
    """Writes tuned choices to a file, and sets `JAX_UB_TUNED`."""

    def write(found):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        entries = {case: (choice, {}) for case, choice in found.items()}
        tuned_file.write(path, {environment(): entries})
        monkeypatch.setenv("JAX_UB_TUNED", str(path))
        return path

    return write


@pytest.fixture
def on_gpus(monkeypatch):
    """Traces programs as on a machine with GPUs."""
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)


def algorithms(function, *operands):
    """Returns the target and cuBLASLt algorithm of each call of a function on GPUs."""
    # A new function each time, because JAX caches traces by function.
    text = cuda_text(jax.jit(lambda *operands: function(*operands)), *operands)
    return [
        (name, attribute(call, "gemm_algorithm")) for name, call in custom_calls(text)
    ]


X, W, DY = shape(M, K), shape(K, N), shape(M, N)
RESIDUAL, MAIN_GRAD = shape(M, K), shape(K, N)


@pytest.mark.parametrize(
    ("op", "sizes", "function", "operands"),
    [
        ("matmul", (M, K, N), ub.linear, (X, W)),
        ("dgrad_add", (M, N, K), ub.dgrad_add, (DY, W, RESIDUAL)),
        ("wgrad_accumulate", (K, M, N), ub.wgrad_accumulate, (X, DY, MAIN_GRAD)),
    ],
)
def test_local_gemm_uses_only_its_own_algorithm(
    engine, file_of, op, sizes, function, operands
):
    case = TunedKey(op, 1, *sizes, "float32")
    file_of({case: SECOND})
    ((_, algorithm),) = algorithms(function, *operands)
    assert algorithm == 1
    others = [other for other in LOCAL_OPS if other != op]
    file_of({TunedKey(other, 1, *sizes, "float32"): SECOND for other in others})
    ((_, algorithm),) = algorithms(function, *operands)
    assert algorithm == 0


def test_gradients_of_a_local_layer_use_their_algorithms(engine, file_of):
    third = MethodChoice(Method.DIRECT, kernel_options=KernelOptions(gemm_algorithm=2))
    file_of(
        {
            TunedKey("dgrad", 1, M, N, K, "float32"): SECOND,
            TunedKey("wgrad", 1, K, M, N, "float32"): third,
        }
    )

    def gradients(x, w, dy):
        return jax.vjp(ub.linear, x, w)[1](dy)

    found = algorithms(gradients, X, W, DY)
    assert sorted(found) == [("matmul", 1), ("wgrad", 2)]


def test_gemm_that_differs_from_the_tuned_one_uses_the_first_algorithm(engine, file_of):
    sizes = {"matmul": (M, K, N), "wgrad": (K, M, N), "wgrad_accumulate": (K, M, N)}
    file_of({TunedKey(op, 1, *s, "float32"): SECOND for op, s in sizes.items()})
    bias = shape(N)
    assert algorithms(ub.linear, X, W, bias) == [("matmul", 0)]
    bf16 = shape(K, N, dtype="bfloat16")
    assert algorithms(ub.wgrad_accumulate, X, DY, bf16) == [("wgrad", 0)]


@pytest.mark.parametrize("method", ["pipeline", "xla"])
def test_call_with_a_method_uses_the_first_algorithm(engine, file_of, method):
    file_of({TunedKey("matmul", 1, M, K, N, "float32"): SECOND})
    found = algorithms(lambda x, w: ub.linear(x, w, method=method), X, W)
    assert found == ([("matmul", 0)] if method == "pipeline" else [])


def row_gradients(mesh, ub_name=None):
    layer = {"axis_name": "tp", "ub_name": ub_name}

    def function(x, w, dy):
        forward = functools.partial(ub.matmul_reduce_scatter, **layer)
        return jax.vjp(forward, x, w)[1](dy)

    features, rows = P(None, "tp"), P("tp")
    return on_ranks(function, mesh, (features, rows, rows), (features, rows))


@pytest.mark.parametrize("initialized", [False, True])
def test_wgrad_of_a_row_layer_uses_its_algorithm(
    engine, on_gpus, file_of, monkeypatch, initialized
):
    path = file_of({TunedKey("wgrad", 1, K // 2, M, N, "float32"): SECOND})
    mesh = tp_mesh(2)
    if initialized:
        monkeypatch.delenv("JAX_UB_TUNED")
        ub.initialize_ub((16, 16), 2, ub_cfgs=path, mesh=mesh)
    found = algorithms(row_gradients(mesh), X, W, DY)
    assert ("wgrad", 1) in found and ("all_gather_matmul", 0) in found


@pytest.mark.parametrize(("ub_cfgs", "expected"), [(None, 1), ("asked", 0)])
def test_wgrad_uses_its_algorithm_unless_its_name_is_configured(
    engine, on_gpus, file_of, ub_cfgs, expected
):
    file_of({TunedKey("wgrad", 1, K // 2, M, N, "float32"): SECOND})
    mesh = tp_mesh(2)
    asked = {"proj_dgrad": {"method": "ring_exchange"}}
    ub.initialize_ub((16, 16), 2, ub_cfgs=ub_cfgs and asked, mesh=mesh)
    run = row_gradients(mesh, "proj")
    found = algorithms(run, X, W, DY)
    assert ("wgrad", expected) in found


@pytest.mark.parametrize(
    ("method", "expected"), [(Method.PIPELINE, {1}), (Method.XLA, set())]
)
def test_wgrad_after_tuned_communication_has_its_own_choice(
    engine, on_gpus, file_of, method, expected
):
    file_of(
        {
            TunedKey(COLUMN_GRADIENTS, 2, M, K, N, "float32"): MethodChoice(method),
            TunedKey("wgrad", 1, K, M, N // 2, "float32"): SECOND,
        }
    )

    def function(x, w, dy):
        forward = functools.partial(ub.all_gather_matmul, axis_name="tp")
        return jax.vjp(forward, x, w)[1](dy)

    rows, columns = P("tp"), P(None, "tp")
    run = on_ranks(function, tp_mesh(2), (rows, columns, columns), (rows, columns))
    found = algorithms(run, X, W, DY)
    assert {algorithm for name, algorithm in found if name == "wgrad"} == expected


def test_local_gemm_may_be_tuned_to_xla(file_of):
    file_of({TunedKey("matmul", 1, M, K, N, "float32"): MethodChoice(Method.XLA)})
    x, w = small_integers(0, (M, K)), small_integers(1, (K, N))
    run = jax.jit(lambda x, w: ub.linear(x, w))
    assert not calls(compiled_text(run, x, w))
    assert_equal(run(x, w), x @ w)


@pytest.mark.parametrize(("algorithm", "expected"), [(1, 1), (3, 0)])
def test_local_gemms_use_the_files_of_axes_only_if_these_are_equal(
    engine, file_of, monkeypatch, algorithm, expected
):
    case = TunedKey("matmul", 1, M, K, N, "float32")
    choices = [
        MethodChoice(Method.DIRECT, kernel_options=KernelOptions(gemm_algorithm=n))
        for n in (1, algorithm)
    ]
    paths = [file_of({case: choice}) for choice in choices]
    monkeypatch.delenv("JAX_UB_TUNED")
    for path, axis_name, used in zip(paths, ("tp", "dp"), (1, expected), strict=True):
        mesh = jax.make_mesh((1,), (axis_name,))
        ub.initialize_ub((16, 16), 1, ub_cfgs=path, mesh=mesh, axis_name=axis_name)
        assert algorithms(ub.linear, X, W) == [("matmul", used)]


def test_local_gemms_of_both_linears_are_tuned_on_gpus():
    shape = Shape(64, 32, 48)
    local = [c for c in cases(shape, 4, "bfloat16", True) if c.op in LOCAL_OPS]
    assert len(local) == len(set(local)) == 2 * len(LOCAL_OPS)
    assert {case.num_ranks for case in local} == {1}
    flops = {case.M * case.K * case.N for case in local}
    assert flops == {64 * 32 * 48 // 4}
    assert all(case.op in LOCAL_OPS for case in cases(shape, 1, "bfloat16", True))
    on_cpus = [case.op for case in cases(shape, 4, "bfloat16", False)]
    assert on_cpus == [op for op in OPS if op not in LOCAL_OPS]


@pytest.mark.parametrize("op", LOCAL_OPS)
def test_candidates_of_a_local_gemm_run(op):
    case = TunedKey(op, 1, 24, 40, 32, "bfloat16")
    choices = candidates(case, is_cuda=True)
    assert [str(choice) for choice in choices] == [
        "direct",
        *(f"direct, gemm_algorithm {number}" for number in range(1, 8)),
        "xla",
    ]
    measured = measure(case, choices, rounds=2)
    assert not measured.failed
    assert measured.pallas is None
    assert set(measured.seconds) == set(choices)
    assert list(measured.seconds.values()) == sorted(measured.seconds.values())


@pytest.mark.parametrize("op", LOCAL_OPS)
def test_timed_call_has_the_key_of_its_case(op):
    case = TunedKey(op, 1, 24, 40, 32, "bfloat16")
    candidate = programs(case)("", function(case, SECOND))
    jaxpr = jax.make_jaxpr(candidate.program)(*candidate.operands)
    every = [equation.params for equation, *_ in equations(jaxpr.jaxpr)]
    (call,) = (params["call"] for params in every if "call" in params)
    assert call.tuned_key(candidate.operands) == case
