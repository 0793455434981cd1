"""Tests which calls use tuned choices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import calls, collectives, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.runtime import communicators, registry, tuned_file
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, TunedKey, environment
from jax_ub.errors import ConfigurationError

SIZES = (16, 8, 12)
COLUMN = ((P("tp"), P(None, "tp")), P(None, "tp"))


@pytest.fixture
def operands():
    M, K, N = SIZES
    return small_integers(0, (M, K)), small_integers(1, (K, N))


def write(
    path, choice, op="all_gather_matmul", dtype="float32", sizes=SIZES, num_ranks=2
):
    case = TunedKey(op, num_ranks, *sizes, dtype)
    tuned_file.write(path, {environment(): {case: (choice, {})}})
    return str(path)


@pytest.fixture
def initialize(tmp_path):
    """Writes a tuned choice to a file, and initializes the axis with it."""

    def tuned(*choice, num_ranks=2, **case):
        path = write(tmp_path / "t.json", *choice, num_ranks=num_ranks, **case)
        mesh = tp_mesh(num_ranks)
        ub.initialize_ub((16, 16), num_ranks, ub_cfgs=path, mesh=mesh)

    return tuned


def column(method=None, ub_name=None):
    def function(x, w):
        return ub.all_gather_matmul(
            x, w, axis_name="tp", method=method, ub_name=ub_name
        )

    return on_ranks(function, tp_mesh(2), *COLUMN)


def lowered(function, *operands):
    return jax.jit(function).lower(*operands).as_text()


def test_auto_uses_the_choice_of_initialize_ub(initialize, operands):
    initialize(MethodChoice(Method.PIPELINE, 3))
    text = lowered(column(), *operands)
    assert "method = 2" in text and "num_splits = 3" in text
    x, w = operands
    assert_equal(column()(x, w), x @ w)


def test_named_call_uses_the_choice(initialize, operands):
    initialize(MethodChoice(Method.RING_EXCHANGE))
    assert ub.get_ub("qkv_fprop").method == "auto"
    assert "method = 1" in lowered(column(ub_name="qkv"), *operands)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_choice_may_have_a_variant(initialize, operands, num_ranks):
    once = MethodChoice(
        Method.RING_EXCHANGE, kernel_options=KernelOptions(variant=Variant.ONE_SHOT)
    )
    initialize(once, "matmul_all_reduce", num_ranks=num_ranks)

    def function(x, w):
        return ub.matmul_all_reduce(x, w, axis_name="tp")

    row = on_ranks(function, tp_mesh(num_ranks), (P(None, "tp"), P("tp")), P())
    text = lowered(row, *operands)
    assert "method = 1" in text and f"variant = {Variant.ONE_SHOT.code}" in text
    x, w = operands
    assert_equal(row(x, w), x @ w)


def test_choice_may_be_xla(initialize, operands):
    initialize(MethodChoice(Method.XLA))
    text = compiled_text(column(), *operands)
    assert not calls(text)
    assert collectives(text)["all-gather"] == 1
    (row,) = ub.explain(column(), *operands).rows
    assert row.reason == 'method = "xla" (the fastest by a tuned table)'


def test_gradient_uses_the_choice_for_its_sizes(initialize, operands):
    M, K, N = SIZES
    choice = MethodChoice(Method.PIPELINE, 2)
    initialize(choice, "matmul_reduce_scatter", sizes=(M, N, K))
    gradient = jax.grad(lambda x, w: jnp.sum(column()(x, w)))
    assert "num_splits = 2" in lowered(gradient, *operands)


def all_gather_matmul(x, w):
    return ub.all_gather_matmul(x, w, axis_name="tp")


def backward(forward=all_gather_matmul):
    """Returns a function of x, w and dy that computes the gradients of x and w."""

    def function(x, w, dy):
        return jax.vjp(forward, x, w)[1](dy)

    (rows, columns), out = COLUMN
    return on_ranks(function, tp_mesh(2), (rows, columns, out), (rows, columns))


@pytest.fixture
def with_dy(operands):
    M, _, N = SIZES
    return *operands, small_integers(2, (M, N))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Method.BULK, {"bulk_all_gather": 1, "bulk_reduce_scatter": 1}),
        (
            Method.PIPELINE,
            {"matmul_reduce_scatter": 1, "all_gather": 1, "wgrad": 1},
        ),
        (Method.DIRECT, {"matmul_reduce_scatter": 1, "wgrad": 1}),
        (Method.XLA, {}),
    ],
)
@pytest.mark.parametrize("num_kernels", [1, 2])
def test_gradients_of_a_column_layer_use_their_choice(
    initialize, with_dy, method, expected, num_kernels
):
    initialize(MethodChoice(method), COLUMN_GRADIENTS)
    x, w, dy = with_dy

    def forward(x, w):
        ws = tuple(jnp.split(w, num_kernels, -1))
        return jnp.concatenate(all_gather_matmul(x, ws), -1)

    run = backward(forward)
    # The forward result is not used, so XLA removes the forward GEMM.
    assert calls(compiled_text(run, *with_dy)) == expected
    dx, dw = run(*with_dy)
    assert_equal(dx, dy @ w.T)
    assert_equal(dw, x.T @ dy)


def test_named_column_layer_uses_the_choice_of_its_gradients(initialize, with_dy):
    initialize(MethodChoice(Method.BULK), COLUMN_GRADIENTS)

    def forward(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv")

    text = compiled_text(backward(forward), *with_dy)
    assert set(calls(text)) == {"bulk_all_gather", "bulk_reduce_scatter"}


def test_gradients_without_gather_use_the_choice_of_the_dgrad(tmp_path, with_dy):
    M, K, N = SIZES
    product = TunedKey("matmul_reduce_scatter", 2, M, N, K, "float32")
    both = TunedKey(COLUMN_GRADIENTS, 2, M, K, N, "float32")
    found = {
        product: (MethodChoice(Method.PIPELINE, 2), {}),
        both: (MethodChoice(Method.XLA), {}),
    }
    tuned_file.write(tmp_path / "t.json", {environment(): found})
    ub.initialize_ub((16, 16), 2, ub_cfgs=tmp_path / "t.json", mesh=tp_mesh(2))

    def forward(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)[0]

    text = lowered(backward(forward), *with_dy)
    assert "num_splits = 2" in text and "jax_ub$wgrad" in text


def test_choice_of_gradients_that_cannot_run_falls_back(
    initialize, with_dy, monkeypatch
):
    initialize(MethodChoice(Method.PIPELINE, 3), COLUMN_GRADIENTS)
    monkeypatch.setattr(communicators, "reason", lambda *_: "it is asked to")
    assert set(calls(compiled_text(backward(), *with_dy))) == {"wgrad"}
    assert ub.fallbacks()[-1].reason == "it is asked to"


def test_explicit_method_overrides_the_choice(initialize, operands):
    initialize(MethodChoice(Method.XLA))
    assert "method = 2" in lowered(column("pipeline"), *operands)


def test_other_sizes_and_dtypes_are_not_tuned(initialize, operands):
    initialize(MethodChoice(Method.XLA), dtype="bfloat16")
    assert "method = 0" in lowered(column(), *operands)


def test_environment_variable_names_a_file(tmp_path, operands, monkeypatch):
    path = write(tmp_path / "t.json", MethodChoice(Method.PIPELINE, 3))
    monkeypatch.setenv("JAX_UB_TUNED", path)
    assert "num_splits = 3" in lowered(column(), *operands)


def test_file_of_another_machine_leaves_nothing_initialized(tmp_path):
    there = tuned_file.Environment("another machine", ())
    tuned_file.write(tmp_path / "t.json", {there: {}})
    with pytest.raises(ConfigurationError, match="is for another machine"):
        ub.initialize_ub((16, 16), 2, ub_cfgs=tmp_path / "t.json", mesh=tp_mesh(2))
    assert not ub.is_ub_initialized()


def test_choice_that_cannot_run_falls_back(initialize, operands, monkeypatch):
    initialize(MethodChoice(Method.PIPELINE, 3))
    monkeypatch.setattr(communicators, "reason", lambda *_: "it is asked to")
    text = compiled_text(column(), *operands)
    assert not calls(text) and collectives(text)["all-gather"] == 1
    assert ub.fallbacks()[-1].reason == "it is asked to"
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="it is asked to"):
        lowered(column("pipeline"), *operands)


def test_explicit_method_ignores_an_unusable_file(tmp_path, operands, monkeypatch):
    monkeypatch.setenv("JAX_UB_TUNED", str(tmp_path / "none.json"))
    assert "method = 2" in lowered(column("pipeline"), *operands)
    missing = r"JAX_UB_TUNED: tuned file '.*none.json': No such file .*--output FILE\."
    with pytest.raises(ConfigurationError, match=missing):
        lowered(column(), *operands)


def test_rewritten_file_is_read_again(tmp_path, operands, monkeypatch):
    path = write(tmp_path / "t.json", MethodChoice(Method.PIPELINE, 3))
    ub.initialize_ub((16, 16), 2, ub_cfgs=path, mesh=tp_mesh(2))
    assert "method = 2" in lowered(column(), *operands)
    ub.destroy_ub()
    write(tmp_path / "t.json", MethodChoice(Method.RING_EXCHANGE))
    ub.initialize_ub((16, 16), 2, ub_cfgs=path, mesh=tp_mesh(2))
    assert "method = 1" in lowered(column(), *operands)
    ub.destroy_ub()
    monkeypatch.setenv("JAX_UB_TUNED", str(path))
    before = registry.configuration()
    assert registry.configuration() == before
    write(tmp_path / "t.json", MethodChoice(Method.PIPELINE, 3))
    assert registry.configuration() != before
    assert "method = 2" in lowered(column(), *operands)
