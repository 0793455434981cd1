"""The functional interface of the Userbuffers linears, on every method."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from linears import LAYOUTS, METHODS, MODES, arrays, bias_grad, dgrad, wgrad, wide
from operands import (
    DTYPES,
    RANK_COUNTS,
    assert_close,
    assert_equal,
    normal,
    small_integers,
)
from programs import (
    calls,
    collectives,
    compiled_text,
    copies,
    on_ranks,
    own_copy,
    tp_mesh,
)
from refusals import zeros

import jax_ub as ub
from jax_ub.ops.fused import UserbuffersBackwardLinear, UserbuffersForwardLinear


def forward(mode, **options):
    return functools.partial(
        UserbuffersForwardLinear.functional_forward,
        tensor_parallel_mode=mode,
        axis_name="tp",
        ub_comm_name="qkv" if mode == "column" else "proj",
        **options,
    )


def backward(mode, **options):
    return functools.partial(
        UserbuffersBackwardLinear.functional_backward,
        tensor_parallel_mode=mode,
        axis_name="tp",
        ub_comm_name="qkv" if mode == "column" else "proj",
        **options,
    )


def run_forward(mode, num_ranks, a, bias=None, **options):
    layout = LAYOUTS[mode]

    def function(x, w, *bias):
        given = {"bias": bias[0].reshape(-1)} if bias else {}
        return forward(mode, **given, **options)(x, w)[0]

    operands = (a.x, a.w) if bias is None else (a.x, a.w, bias)
    specs = (layout.x, layout.w, P("tp"))[: len(operands)]
    return on_ranks(function, tp_mesh(num_ranks), specs, layout.y)(*operands)


def backward_program(mode, num_ranks, *, names=(), donate=(), **options):
    """Returns a jitted function of dy, x, w and the arrays in `names`."""
    layout = LAYOUTS[mode]
    specs = {"main_grad": layout.w, "residual": layout.x}
    bias_spec = P("tp") if mode == "column" else P()

    def function(dy, x, w, *others):
        given = dict(zip(names, others, strict=True))
        dx, dw, extra = backward(mode, **given, **options)(dy, x, w)
        return dx, dw, extra["grad_bias"]

    kept = options.get
    out = (
        layout.x if kept("input_requires_grad", True) else None,
        layout.w if kept("weight_requires_grad", True) else None,
        bias_spec if kept("bias_requires_grad", False) else None,
    )
    mapped = jax.shard_map(
        function,
        mesh=tp_mesh(num_ranks),
        in_specs=(layout.y, layout.x, layout.w, *(specs[name] for name in names)),
        out_specs=out,
    )
    return jax.jit(mapped, donate_argnums=donate)


@pytest.mark.parametrize("mode", MODES)
def test_forward_is_exact_for_every_method(mode):
    a, layout = arrays(4), LAYOUTS[mode]

    def function(x, w):
        return [forward(mode, method=method)(x, w)[0] for method in METHODS]

    run = on_ranks(function, tp_mesh(4), (layout.x, layout.w), layout.y)
    for found in run(a.x, a.w):
        assert_equal(found, wide(a.x) @ wide(a.w))


@covering(mode=MODES, num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_forward_is_exact_for_every_number_of_ranks(mode, num_ranks, dtype):
    a = arrays(num_ranks, dtype)
    # In "row" each rank has a different bias, and their sum is added.
    n = a.w.shape[1]
    shape = (n,) if mode == "column" else (num_ranks, n)
    bias = small_integers(5, shape)
    added = bias if mode == "column" else bias.sum(0)
    expected = (wide(a.x) @ wide(a.w) + added).astype(dtype)
    assert_equal(run_forward(mode, num_ranks, a, bias), expected)


def test_forward_adds_a_replicated_bias_once_per_rank():
    a, bias = arrays(4), small_integers(5, (28,))
    layout = LAYOUTS["row"]
    for check_vma in (True, False):
        run = on_ranks(
            lambda x, w, b: forward("row", bias=b)(x, w)[0],
            tp_mesh(4),
            (layout.x, layout.w, P()),
            layout.y,
            check_vma=check_vma,
        )
        assert_equal(run(a.x, a.w, bias), a.x @ a.w + 4 * bias)


@pytest.mark.parametrize("mode", MODES)
def test_forward_returns_the_operands_of_the_backward(mode):
    a, layout = arrays(2, "bfloat16"), LAYOUTS[mode]

    def function(x, w):
        return forward(mode, dtype="float32")(x, w)

    out = (layout.y, {"input": layout.x, "weight": layout.w})
    y, saved = on_ranks(function, tp_mesh(2), (layout.x, layout.w), out)(a.x, a.w)
    assert_equal(y, wide(a.x) @ wide(a.w))
    assert_equal(saved, {"input": wide(a.x), "weight": wide(a.w)})


@pytest.mark.parametrize("mode", MODES)
def test_backward_is_exact_for_every_method(mode):
    a, layout = arrays(4), LAYOUTS[mode]
    methods = [*METHODS, *(["bulk"] if mode == "column" else [])]

    def function(dy, x, w):
        return [backward(mode, method=method)(dy, x, w)[:2] for method in methods]

    specs = (layout.y, layout.x, layout.w)
    out = [(layout.x, layout.w)] * len(methods)
    run = on_ranks(function, tp_mesh(4), specs, out)
    for found in run(a.dy, a.x, a.w):
        assert_equal(found, (dgrad(a), wgrad(a)))


@covering(mode=MODES, num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_backward_is_exact_for_every_number_of_ranks(mode, num_ranks, dtype):
    a = arrays(num_ranks, dtype)
    is_bulk = mode == "column" and dtype == "bfloat16"
    method = "bulk" if is_bulk else None
    run = backward_program(mode, num_ranks, bias_requires_grad=True, method=method)
    expected = dgrad(a).astype(dtype), wgrad(a).astype(dtype), bias_grad(a)
    assert_equal(run(a.dy, a.x, a.w), expected)


@pytest.mark.parametrize(
    ("mode", "method", "dtype"),
    [
        ("column", "bulk", DTYPES[0]),
        ("row", "external", DTYPES[0]),
        *((mode, "auto", DTYPES[1]) for mode in MODES),
        *((mode, "pipeline", DTYPES[2]) for mode in MODES),
    ],
)
def test_backward_is_close_on_normal_values(mode, method, dtype):
    a = arrays(3, dtype, normal)
    dx, dw, db = backward_program(mode, 3, bias_requires_grad=True, method=method)(
        a.dy, a.x, a.w
    )
    assert_close(dx, dgrad(a), a.w.shape[1])
    assert_close(dw, wgrad(a), 2 * 9)
    assert_close(db, bias_grad(a), 2 * 9)


@pytest.mark.parametrize("batch", [(), (1, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_backward_takes_any_batch_axes(mode, batch):
    a = arrays(2, batch=batch)
    layout = LAYOUTS[mode]
    method = "bulk" if mode == "column" else "ring_exchange"
    rows = P(*(None for _ in batch), "tp")
    features = P(*(None for _ in batch), None, "tp")
    x, y = (rows, features) if mode == "column" else (features, rows)
    run = on_ranks(
        lambda *v: backward(mode, method=method)(*v)[:2],
        tp_mesh(2),
        (y, x, layout.w),
        (x, layout.w),
    )
    assert_equal(run(a.dy, a.x, a.w), (dgrad(a), wgrad(a)))


@pytest.mark.parametrize(
    ("mode", "method"),
    [("column", "bulk"), *itertools.product(MODES, ["auto", "ring_exchange"])],
)
def test_gradients_are_added_to_main_grad_and_residual(mode, method):
    a = arrays(4, "bfloat16")
    names = ("main_grad", "residual")
    run = backward_program(mode, 4, names=names, method=method)
    dx, dw, _ = run(a.dy, a.x, a.w, a.main_grad, a.residual)
    assert_equal(dw, a.main_grad + wgrad(a))
    assert_equal(dx, (dgrad(a) + wide(a.residual)).astype("bfloat16"))


@pytest.mark.parametrize("mode", MODES)
def test_the_sum_has_the_dtype_of_the_residual(mode):
    a = arrays(4, "bfloat16")
    run = backward_program(mode, 4, names=("residual",))
    dx, _, _ = run(a.dy, a.x, a.w, wide(a.residual))
    assert_equal(dx, dgrad(a) + wide(a.residual))


@pytest.mark.parametrize("method", ["auto", "ring_exchange", "bulk"])
def test_the_sum_with_the_residual_is_rounded_once(method):
    # The product, 257, is not a bf16 number, but the sum, 258, is.
    dy = jnp.ones((8, 258), jnp.bfloat16).at[:, 0].set(0)
    x, w = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 258), jnp.bfloat16)
    run = on_ranks(
        lambda dy, x, w: backward("column", method=method, residual=x)(dy, x, w)[0],
        tp_mesh(2),
        (P(None, "tp"), P("tp"), P(None, "tp")),
        P("tp"),
    )
    assert_equal(run(dy, x, w), jnp.full((8, 4), 258, jnp.bfloat16))


COUNTS = {
    ("column", "auto", "none"): {"matmul_reduce_scatter": 1, "wgrad": 1},
    ("column", "bulk", "none"): {"bulk_all_gather": 1, "bulk_reduce_scatter": 1},
    ("column", "ring_exchange", "none"): {
        "matmul_reduce_scatter": 1,
        "all_gather": 1,
        "wgrad": 1,
    },
    ("column", "auto", "weight"): {"matmul_reduce_scatter": 1},
    ("column", "bulk", "weight"): {"matmul_reduce_scatter": 1},
    ("column", "auto", "input"): {"wgrad": 1},
    ("column", "bulk", "input"): {"all_gather": 1, "wgrad": 1},
    ("row", "auto", "none"): {"all_gather_matmul": 1, "wgrad": 1},
    ("row", "ring_exchange", "none"): {"all_gather_matmul": 1, "wgrad": 1},
    ("row", "auto", "weight"): {"all_gather_matmul": 1},
    ("row", "auto", "input"): {"wgrad": 1},
    ("row", "ring_exchange", "input"): {"all_gather": 1, "wgrad": 1},
}


@pytest.mark.parametrize(("mode", "method", "frozen"), COUNTS)
def test_backward_runs_these_calls_and_no_collective(mode, method, frozen):
    a = arrays(4)
    options = {} if frozen == "none" else {f"{frozen}_requires_grad": False}
    run = backward_program(mode, 4, method=method, **options)
    text = compiled_text(run, a.dy, a.x, a.w)
    assert calls(text) == COUNTS[mode, method, frozen]
    assert not collectives(text)
    dx, dw, db = run(a.dy, a.x, a.w)
    assert db is None
    assert_equal(dx, None if frozen == "input" else dgrad(a))
    assert_equal(dw, None if frozen == "weight" else wgrad(a))


def test_row_sums_the_bias_gradient_over_the_ranks_in_one_call():
    a = arrays(4)
    run = backward_program("row", 4, bias_requires_grad=True)
    text = compiled_text(run, a.dy, a.x, a.w)
    assert calls(text) == {"all_gather_matmul": 1, "wgrad": 1, "all_reduce": 1}
    assert not collectives(text)


@pytest.mark.parametrize(
    ("mode", "method"), [("column", "auto"), ("column", "bulk"), ("row", "auto")]
)
def test_donated_operands_are_updated_in_place(mode, method):
    a, layout = arrays(4), LAYOUTS[mode]
    names = ("main_grad", "residual")
    run = backward_program(mode, 4, names=names, donate=(3, 4), method=method)
    main_grad = own_copy(a.main_grad, tp_mesh(4), layout.w)
    residual = own_copy(a.residual, tp_mesh(4), layout.x)
    local = [array.addressable_shards[0].data.shape for array in (main_grad, residual)]
    text = compiled_text(run, a.dy, a.x, a.w, main_grad, residual)
    for shape in local:
        assert copies(text, f"f32[{','.join(map(str, shape))}]") == 0
    pointers = [s.data.unsafe_buffer_pointer() for s in main_grad.addressable_shards]
    dx, dw, _ = run(a.dy, a.x, a.w, main_grad, residual)
    assert pointers == [s.data.unsafe_buffer_pointer() for s in dw.addressable_shards]
    assert_equal((dx, dw), (dgrad(a) + a.residual, a.main_grad + wgrad(a)))


@pytest.mark.parametrize("mode", MODES)
def test_repeated_calls_are_bitwise_equal(mode):
    a = arrays(8, "bfloat16", normal)
    run = backward_program(mode, 8, bias_requires_grad=True)
    first = run(a.dy, a.x, a.w)
    for _ in range(5):
        assert_equal(run(a.dy, a.x, a.w), first)


def refused(function, *shapes, mode="column", num_ranks=2, **options):
    """Returns the text of the error that a call with these shapes raises."""
    operands = [None if s is None else jnp.zeros(s, options.pop("of", "float32"))
                for s in shapes]  # fmt: skip

    def body(*given):
        given = iter(given)
        full = [None if s is None else next(given) for s in shapes]
        return function(mode, **options)(*full)

    given = [array for array in operands if array is not None]
    run = jax.shard_map(
        body, mesh=tp_mesh(num_ranks), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ub.errors.UbError) as caught:
        jax.eval_shape(run, *given)
    return f"{type(caught.value).__name__}: {caught.value}"


BOTH = pytest.mark.parametrize(
    ("function", "shapes"),
    [(forward, ((4, 6), (6, 8))), (backward, ((8, 8), (4, 6), (6, 8)))],
    ids=["forward", "backward"],
)


@BOTH
def test_calls_have_no_derivatives(function, shapes):
    def gradient(mode):
        def total(*operands):
            return jnp.sum(function(mode)(*operands)[0])

        return jax.grad(total)

    text = refused(gradient, *shapes)
    assert (
        "functional_forward or functional_backward of jax_ub.ops.fused, which" in text
    )


@BOTH
def test_calls_that_do_not_overlap_are_rejected(function, shapes):
    text = refused(function, *shapes, sequence_parallel=False)
    assert "UnsupportedOverlapError: Userbuffers" in text
    assert "sequence_parallel = False, but only all-gathers and" in text
    text = refused(function, *shapes, mode="colunm")
    assert "tensor_parallel_mode = 'colunm' is not" in text
    assert "Did you mean 'column'?" in text
    text = refused(function, *shapes, mode=None)
    assert "tensor_parallel_mode = None is not" in text
    text = refused(function, *shapes, dtype="int32")
    assert "(ub_name 'qkv'): dtype = int32, but the op computes in float32" in text
    text = refused(function, *shapes, method="rings")
    assert "UnknownNameError" in text
    assert "'rings' is not a method" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ub_comm_name": 3}, ": ub_comm_name = 3 is not the name of a layer"),
        ({"weight": np.zeros((8, 8), np.int32)}, ": weight is int32, but the op takes"),
    ],
)
def test_errors_name_the_arguments_of_functional_calls(options, text):
    x = np.zeros((8, 8), np.float32)
    given = {"input": x, "weight": x, "axis_name": "tp", **options}
    forward = UserbuffersForwardLinear.functional_forward
    backward = UserbuffersBackwardLinear.functional_backward
    for call in (forward, functools.partial(backward, x)):
        run = jax.shard_map(
            functools.partial(call, tensor_parallel_mode="column", **given),
            mesh=tp_mesh(2),
            in_specs=(),
            out_specs=P(),
        )
        with pytest.raises(ub.errors.UbError, match=text):
            jax.eval_shape(run)


@BOTH
def test_axis_name_is_required(function, shapes):
    call = function("column")
    operands = [jnp.zeros(shape) for shape in shapes]
    call.keywords["axis_name"] = None
    message = "needs the mesh axis of the ranks, but axis_name = None"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        call(*operands)
    call.keywords["axis_name"] = "tp"
    message = "axis_name = 'tp' is not a manual mesh axis"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        call(*operands)


@pytest.mark.parametrize(
    ("shapes", "options", "text"),
    [
        (((6,), (6, 8)), {}, r"input has shape (6,), but the op takes [..., rows"),
        (((4, 6), (8,)), {}, "weight has shape (8,), but a kernel is [in, out]"),
        (((4, 6), (8, 6)), {}, "has K = 6, but w (8, 6) has K = 8"),
        (((0, 6), (6, 8)), {}, "input has shape (0, 6), which is empty"),
        (((4, 6), (6, 8)), {"of": "int32", "dtype": "float32"}, "input is int32"),
        (((5, 6), (6, 8)), {"mode": "row"}, "Pad to 6 rows"),
        (((4, 6), (6, 8)), {"bias": zeros(4)}, "bias has shape (4,), but here"),
    ],
)
def test_forward_rejects_wrong_shapes(shapes, options, text):
    found = refused(forward, *shapes, **options)
    assert "ShapeContractError: UserbuffersForwardLinear" in found
    assert text in found


DY, X, W = (8, 8), (4, 6), (6, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "text"),
    [
        (((8,), X, W), {}, "grad_output has shape (8,), but the op takes"),
        ((DY, X, None), {}, "weight is None, but the gradient of the input needs it"),
        ((DY, None, W), {}, "input is None, but the gradient of the weight needs it"),
        ((DY, X, (8, 6)), {}, "has N = 8, but weight (8, 6) has N = 6"),
        ((DY, (4, 8), W), {}, "has K = 8, but w (6, 8) has K = 6"),
        (((4, 8), X, W), {}, "grad_output has shape (4, 8), but here it is [..., M, N"),
        ((DY, X, W), {"mode": "row"}, "but here it is [..., M/P, N] for input (4, 6)"),
        ((DY, (3, 6), W), {"mode": "row"}, "Pad to 4 rows"),
        ((DY, X, W), {"main_grad": zeros(8, 6)}, "main_grad has shape (8, 6)"),
        (
            (DY, X, W),
            {"main_grad": zeros(*W, dtype="bfloat16")},
            "main_grad is bfloat16, but gradients are accumulated in float32",
        ),
        (
            (DY, X, W),
            {"main_grad": zeros(*W), "weight_requires_grad": False},
            "main_grad is given, but weight_requires_grad = False",
        ),
        ((DY, X, W), {"residual": zeros(*DY)}, "residual has shape (8, 8), but"),
        (
            (DY, X, W),
            {"residual": zeros(*X), "input_requires_grad": False},
            "residual is given, but input_requires_grad = False",
        ),
        ((DY, X, W), {"residual": zeros(*X, dtype="int32")}, "residual is int32"),
    ],
)
def test_backward_rejects_wrong_shapes(shapes, options, text):
    found = refused(backward, *shapes, **options)
    assert "ShapeContractError: UserbuffersBackwardLinear" in found
    assert text in found
