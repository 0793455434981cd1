"""BasicLinear: every layout of it, without overlap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_equal, small_integers
from ops_on_ranks import (
    FEATURES,
    TOKENS,
    assert_are_plain,
    integers_of,
    value_and_gradients,
)
from programs import (
    calls,
    compiled_text,
    copies,
    dp_tp_mesh,
    on_ranks,
    own_copy,
    tp_mesh,
)

import jax_ub as ub
from jax_ub import ops

LAYOUTS = {
    ("column", True): (TOKENS, FEATURES),
    ("column", False): (P(), FEATURES),
    ("row", True): (FEATURES, TOKENS),
    ("row", False): (FEATURES, P()),
}


def linear(mode=None, sequence_parallel=False, k=24, n=48, **options):
    return ops.BasicLinear(
        k,
        n,
        tensor_parallel_mode=mode,
        sequence_parallel=sequence_parallel,
        **options,
    )


def plain(params, x):
    (own,) = params
    return x @ own["kernel"].astype(x.dtype)


# Numbers of ranks that divide 24.
@covering(num_ranks=[1, 2, 3, 8, *nightly(4)], dtype=DTYPES)
def test_every_mode_equals_the_global_product(num_ranks, dtype):
    x = small_integers(7, (24, 24), dtype)
    assert_are_plain(cases(), plain, num_ranks, x)


def test_linears_without_check_vma_follow_jax():
    assert_are_plain(cases(), plain, 4, small_integers(7, (24, 24)), check_vma=False)


def cases():
    return [
        (ops.Sequential(linear(*layout)), *specs) for layout, specs in LAYOUTS.items()
    ]


@pytest.mark.parametrize(
    "kernel, rows",
    [((64, 32), ()), ((3, 5), (5, 1)), ((128, 128), (4, 2, 4)), ((3, 5), (128,))],
)
def test_any_leading_axes(kernel, rows):
    seq = ops.Sequential(linear(k=kernel[0], n=kernel[1]))
    params = integers_of(seq)
    x = small_integers(1, (*rows, kernel[0]))
    weights = small_integers(2, (*rows, kernel[1]))
    actual = value_and_gradients(seq, weights)(params, x)
    assert_equal(actual, value_and_gradients(plain, weights)(params, x))


@pytest.mark.parametrize("layout", [(None, False), *LAYOUTS])
def test_accumulates_into_main_grad(layout):
    x_spec, y_spec = LAYOUTS.get(layout, (P(), P()))
    num_ranks = 1 if layout[0] is None else 4
    seq = ops.Sequential(linear(*layout, accumulate_into_main_grad=True))
    params = integers_of(seq)
    x = small_integers(1, (8, 24))
    weights = small_integers(2, (8, 48))
    run = on_ranks(seq, tp_mesh(num_ranks), (seq.specs(), x_spec), y_spec)
    y, ((gradient,), dx) = value_and_gradients(run, weights)(params, x)
    (own,) = params
    assert_equal(y, x @ own["kernel"])
    assert_equal(dx, weights @ own["kernel"].T)
    assert_equal(gradient["main_grad"], own["main_grad"] + x.T @ weights)
    assert_equal(gradient["kernel"], jnp.zeros_like(own["kernel"]))


def test_accumulates_in_place_under_a_scan_over_microbatches():
    seq = ops.Sequential(linear("column", True, accumulate_into_main_grad=True))
    weights, main_grads = ops.split_main_grads(integers_of(seq))
    specs, main_grad_specs = ops.split_main_grads(seq.specs())

    def step(weights, main_grads, xs):
        def microbatch(main_grads, x):
            def loss(main_grads):
                y = seq(ops.merge_main_grads(weights, main_grads), x)
                return jnp.sum(y**2)

            return jax.grad(loss)(main_grads), None

        return jax.lax.scan(microbatch, main_grads, xs)[0]

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=tp_mesh(2),
            in_specs=(specs, main_grad_specs, P(None, "tp")),
            out_specs=main_grad_specs,
        ),
        donate_argnums=1,
    )
    xs = small_integers(3, (5, 8, 24))
    expected = main_grads[0]["main_grad"] + sum(
        x.T @ (2 * (x @ weights[0]["kernel"])) for x in xs
    )
    main_grads = own_copy(main_grads, tp_mesh(2), FEATURES)
    text = compiled_text(run, weights, main_grads, xs)
    assert copies(text, "f32[24,24]") == 0
    old = main_grads[0]["main_grad"].addressable_shards
    pointers = [shard.data.unsafe_buffer_pointer() for shard in old]
    new = run(weights, main_grads, xs)[0]["main_grad"]
    assert_equal(new, expected)
    assert pointers == [s.data.unsafe_buffer_pointer() for s in new.addressable_shards]


@pytest.mark.parametrize("layout", [(None, False), *LAYOUTS])
def test_gradients_that_are_not_requested_cost_nothing(layout):
    x_spec, y_spec = LAYOUTS.get(layout, (P(), P()))
    seq = ops.Sequential(linear(*layout))
    run = on_ranks(seq, tp_mesh(2), (seq.specs(), x_spec), y_spec)
    params, x = integers_of(seq), small_integers(1, (8, 24))
    loss = lambda *v: jnp.sum(run(*v) ** 2)  # noqa: E731

    def products(argnums):
        found = calls(compiled_text(jax.jit(jax.grad(loss, argnums)), params, x))
        return found["matmul"] + found["wgrad"]

    assert (products(0), products(1), products((0, 1))) == (2, 2, 3)


# The gradients of a row-parallel layer share one all-gather of dy.
COLLECTIVES = {
    ("column", True): {"all_gather": 2, "reduce_scatter": 1},
    ("column", False): {"all_reduce": 1},
    ("row", True): {"reduce_scatter": 1, "all_gather": 1},
    ("row", False): {"all_reduce": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemms_and_collectives_are_separate_calls(layout):
    seq, (x_spec, y_spec) = ops.Sequential(linear(*layout)), LAYOUTS[layout]
    run = on_ranks(seq, tp_mesh(2), (seq.specs(), x_spec), y_spec)
    params, x = seq.init(jax.random.key(0)), small_integers(1, (8, 24))
    loss = lambda *v: jnp.sum(run(*v) ** 2)  # noqa: E731
    found = calls(compiled_text(jax.jit(jax.grad(loss, (0, 1))), params, x))
    assert found == {"matmul": 2, "wgrad": 1, **COLLECTIVES[layout]}


def test_dtype_of_the_computation_and_of_the_parameters():
    x, w = small_integers(0, (8, 24)), small_integers(1, (24, 48))
    for dtype, given, wanted in (
        (None, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ):
        seq = ops.Sequential(linear(dtype=dtype))
        params = ({"kernel": w},)
        step = value_and_gradients(seq, jnp.ones((8, 48)))
        y, ((gradient,), dx) = step(params, x.astype(given))
        assert_equal(y, (x @ w).astype(wanted))
        assert (gradient["kernel"].dtype, dx.dtype) == (w.dtype, given)
        assert_equal(gradient["kernel"], x.T @ jnp.ones((8, 48)))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_f64_means_f32_as_in_jax():
    wide = {"dtype": jnp.float64, "param_dtype": np.float64}
    seq = ops.Sequential(linear(**wide), ops.Bias(48, **wide))
    params, x = integers_of(seq), small_integers(0, (8, 24))
    y, (gradients, _) = value_and_gradients(seq, jnp.ones((8, 48)))(params, x)
    assert_equal(y, x @ params[0]["kernel"] + params[1]["bias"])
    assert_equal(gradients[0]["kernel"], x.T @ jnp.ones((8, 48)))


def test_data_parallel_gradients_are_summed():
    seq = ops.Sequential(linear("column", True))
    params = integers_of(seq)
    x, weights = small_integers(1, (16, 24)), small_integers(2, (16, 48))
    specs = (seq.specs(), P(("dp", "tp")))
    run = on_ranks(seq, dp_tp_mesh(2, 2), specs, P("dp", "tp"))
    actual = value_and_gradients(run, weights)(params, x)
    assert_equal(actual, value_and_gradients(plain, weights)(params, x))


def test_the_initial_kernel_equals_that_of_flax():
    from flax import nnx

    key = jax.random.key(3)
    kernel = linear().init(key)["kernel"]
    expected = nnx.nn.linear.default_kernel_init(key, (24, 48), jnp.float32)
    np.testing.assert_array_equal(kernel, expected)
    half = linear(param_dtype=jnp.bfloat16, kernel_init=jax.nn.initializers.ones)
    assert_equal(half.init(key)["kernel"], jnp.ones((24, 48), jnp.bfloat16))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"mode": "colunm"}, "UnknownNameError", "'colunm' is not a way.*'column'"),
        ({"k": 0}, "ShapeContractError", "in_features = 0 is not a positive integer"),
        ({"n": 8.0}, "ShapeContractError", "out_features = 8.0 is not a positive"),
        (
            {"dtype": "float8_e5m2"},
            "ShapeContractError",
            "dtype = float8_e5m2, but operations compute in float32, bfloat16 or f",
        ),
        (
            {"param_dtype": jnp.float8_e4m3fn},
            "ShapeContractError",
            "param_dtype = float8_e4m3fn, but operations compute in",
        ),
        (
            {"userbuffers_options": {"comm_nam": "qkv"}},
            "ShapeContractError",
            "has no comm_name. Pass userbuffers_options=",
        ),
        (
            {"userbuffers_options": {"comm_name": "qkv", "methd": "bulk"}},
            "UnknownNameError",
            "has no 'methd'. Did you mean 'method'",
        ),
        (
            {"userbuffers_options": {"comm_name": ""}},
            "ShapeContractError",
            "comm_name = '' is not the name of an overlap",
        ),
    ],
)
def test_wrong_constructor_arguments_are_rejected(options, error, message):
    with pytest.raises(getattr(ub.errors, error), match=message):
        linear(**options)


def test_wrong_operands_are_rejected():
    x = small_integers(0, (8, 24))
    error = ub.errors.ShapeContractError

    def call(op, x, kernel, num_ranks=2, specs=(FEATURES, TOKENS), y_spec=FEATURES):
        seq = ops.Sequential(op)
        in_specs = (({"kernel": specs[0]},), specs[1])
        run = on_ranks(seq, tp_mesh(num_ranks), in_specs, y_spec)
        return run(({"kernel": kernel},), x)

    with pytest.raises(error, match=r"operation 0 \(BasicLinear\): .*kernel has shape"):
        call(linear("column", True), x, jnp.zeros((48, 24)))
    with pytest.raises(error, match="out_features = 50 is not a multiple of the 4"):
        call(linear("column", True, n=50), x, jnp.zeros((24, 48)), 4)
    with pytest.raises(error, match="in_features = 26 is not a multiple of the 4"):
        call(linear("row", True, k=26), x, jnp.zeros((24, 48)), 4)
    with pytest.raises(error, match="7 rows .axis -2., which do not divide into 2"):
        row = linear("row", True)
        call(row, x[:7], jnp.zeros((24, 48)), 2, (TOKENS, FEATURES), TOKENS)
    with pytest.raises(error, match="has shape .*, but the op takes .*rows, features"):
        call(linear("column", True), x[0], jnp.zeros((24, 48)), 2, (FEATURES, P()))
    with pytest.raises(error, match="axis_name = 'tp' is not a manual mesh axis"):
        ops.Sequential(linear("column"))(({"kernel": jnp.zeros((24, 48))},), x)
    with pytest.raises(error, match="kernel is int32, but the op takes float32"):
        ops.Sequential(linear())(({"kernel": jnp.zeros((24, 48), int)},), x)


def test_replicated_main_grad_of_varying_gradients_is_rejected():
    seq = ops.Sequential(linear("column", True, accumulate_into_main_grad=True))
    params, x = seq.init(jax.random.key(0)), small_integers(1, (16, 24))
    specs = (seq.specs(), P(("dp", "tp")))
    run = on_ranks(seq, dp_tp_mesh(2, 2), specs, P("dp", "tp"))
    message = r"BasicLinear: main_grad is the same on all ranks of \['dp'\]"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        run(params, x)


def test_one_main_grad_in_two_calls_is_rejected():
    seq = ops.Sequential(linear(accumulate_into_main_grad=True))
    params, x = seq.init(jax.random.key(0)), small_integers(1, (16, 24))
    twice = lambda params: jnp.sum(seq(params, x) + seq(params, x))  # noqa: E731
    message = "BasicLinear: this main_grad went into another call already"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.grad(twice)(params)
