"""main_grad: an accumulator whose cotangent is its new value, in place."""

import gc
import itertools

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import (
    by_method,
    calls,
    compiled_text,
    copies,
    dp_tp_mesh,
    on_ranks,
    own_copy,
    tp_mesh,
)

import jax_ub as ub

KINDS = {
    None: (P(), P(), P()),
    "column": (P("tp"), P(None, "tp"), P(None, "tp")),
    "row": (P(None, "tp"), P("tp"), P("tp")),
    "column without sequence parallelism": (P(), P(None, "tp"), P(None, "tp")),
    "row without sequence parallelism": (P(None, "tp"), P("tp"), P("tp")),
}

KINDS_AND_METHODS = [
    *itertools.product(KINDS, ["auto", "ring_exchange", "pipeline", "xla"]),
    ("column", "bulk"),
]


def layer(kind, method=None, mesh=None):
    parallel = None if kind is None else kind.split()[0]
    options = by_method(method, mesh)

    def call(x, w, main_grad):
        return ub.linear(
            x,
            w,
            parallel=parallel,
            axis_name="tp",
            sequence_parallel=kind in ("column", "row"),
            main_grad=main_grad,
            **options,
        )

    return call


def operands():
    x, w = small_integers(0, (8, 16)), small_integers(1, (16, 24))
    return x, w, small_integers(2, w.shape)


@pytest.mark.parametrize(("kind", "method"), KINDS_AND_METHODS)
def test_its_cotangent_is_its_new_value_and_the_kernel_s_is_zero(kind, method):
    call = layer(kind, method, tp_mesh(4))

    def gradients(x, w, main_grad):
        loss = lambda *v: jnp.sum(call(*v).astype("float32"))  # noqa: E731
        return jax.grad(loss, (1, 2))(x, w, main_grad)

    specs = KINDS[kind]
    run = on_ranks(gradients, tp_mesh(4), specs, specs[1])
    x, w, main_grad = operands()
    dw, new = run(x, w, main_grad)
    assert_equal(dw, jnp.zeros_like(w))
    assert_equal(new, main_grad + x.T @ jnp.ones((8, 24)))


@pytest.mark.parametrize("kind", [None, "column", "row"])
def test_accumulates_in_place_under_a_scan_over_microbatches(kind):
    call = layer(kind)

    def step(xs, w, main_grad):
        def microbatch(main_grad, x):
            loss = lambda m: jnp.sum(call(x, w, m) ** 2)  # noqa: E731
            return jax.grad(loss)(main_grad), None

        return lax.scan(microbatch, main_grad, xs)[0]

    x_spec, w_spec, _ = KINDS[kind]
    run = jax.jit(
        jax.shard_map(
            step,
            mesh=tp_mesh(2),
            in_specs=(P(None, *x_spec), w_spec, w_spec),
            out_specs=w_spec,
        ),
        donate_argnums=2,
    )
    _, w, main_grad = operands()
    xs = small_integers(0, (5, 8, 16))
    main_grad = own_copy(main_grad, tp_mesh(2), w_spec)
    text = compiled_text(run, xs, w, main_grad)
    local = main_grad.addressable_shards[0].data.shape
    assert copies(text, f"f32[{local[0]},{local[1]}]") == 0
    expected = main_grad + sum(x.T @ (2 * (x @ w)) for x in xs)
    pointers = [s.data.unsafe_buffer_pointer() for s in main_grad.addressable_shards]
    result = run(xs, w, main_grad)
    assert_equal(result, expected)
    assert pointers == [
        s.data.unsafe_buffer_pointer() for s in result.addressable_shards
    ]


def test_kernels_in_a_tuple_have_their_own():
    x, w, main_grad = operands()
    v, other = small_integers(3, (16, 8)), small_integers(4, (16, 8))

    def gradients(x, ws, main_grads):
        def loss(main_grads):
            ys = ub.all_gather_matmul(x, ws, axis_name="tp", main_grad=main_grads)
            return sum(jnp.sum(y) for y in ys)

        return jax.grad(loss)(main_grads)

    kernel = P(None, "tp")
    run = on_ranks(gradients, tp_mesh(2), (P("tp"), kernel, kernel), kernel)
    expected = (
        main_grad + x.T @ jnp.ones((8, 24)),
        other + x.T @ jnp.ones((8, 8)),
    )
    assert_equal(run(x, (w, v), (main_grad, other)), expected)
    assert calls(compiled_text(run, x, (w, v), (main_grad, other)))["wgrad"] == 1


def test_frozen_input_needs_the_wgrad_only():
    x, w, main_grad = operands()
    step = jax.jit(jax.grad(lambda m: jnp.sum(ub.linear(x, w, main_grad=m) ** 2)))
    assert calls(compiled_text(step, main_grad)) == {"matmul": 1, "wgrad": 1}


def test_data_parallel_ranks_accumulate_their_own():
    x, w, main_grad = operands()

    def gradients(x, w, main_grad):
        own = lax.pcast(jnp.zeros_like(main_grad), "dp", to="varying")
        loss = lambda m: jnp.sum(layer("column")(x, w, m))  # noqa: E731
        return main_grad + lax.psum(jax.grad(loss)(own), "dp")

    specs = (P(("dp", "tp")), P(None, "tp"), P(None, "tp"))
    run = on_ranks(gradients, dp_tp_mesh(2, 2), specs, P(None, "tp"))
    expected = main_grad + x.T @ jnp.ones((8, 24))
    assert_equal(run(x, w, main_grad), expected)


def test_axis_of_one_rank_needs_no_cast():
    x, w, main_grad = operands()

    def gradients(x, w, main_grad):
        loss = lambda m: jnp.sum(layer("column")(x, w, m))  # noqa: E731
        return jax.grad(loss)(main_grad)

    specs = (P(("dp", "tp")), P(None, "tp"), P(None, "tp"))
    run = on_ranks(gradients, dp_tp_mesh(1, 2), specs, P(None, "tp"))
    assert_equal(run(x, w, main_grad), main_grad + x.T @ jnp.ones((8, 24)))


def test_replicated_accumulator_of_differing_gradients_is_refused():
    x, w, main_grad = operands()
    specs = (P(("dp", "tp")), P(None, "tp"), P(None, "tp"))
    run = on_ranks(layer("column"), dp_tp_mesh(2, 2), specs, P("dp", "tp"))
    message = r"main_grad is the same on all ranks of \['dp'\].*to='varying'"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        run(x, w, main_grad)


def test_one_accumulator_in_two_calls_is_refused():
    x, w, main_grad = operands()

    def loss(main_grad):
        y = ub.linear(x, w, main_grad=main_grad)
        return jnp.sum(y + ub.linear(x, w, main_grad=main_grad))

    message = "linear: this main_grad went into another call already"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.grad(loss)(main_grad)
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.jit(jax.grad(loss))(main_grad)


def test_an_accumulator_that_a_loop_closes_over_is_refused():
    x, w, main_grad = operands()
    xs = jnp.stack([x, 2 * x])

    def loss(main_grad):
        return jnp.sum(lax.map(lambda x: ub.linear(x, w, main_grad=main_grad), xs))

    assert_equal(jax.jit(loss)(main_grad), 3 * jnp.sum(x @ w))
    message = "linear: jax.lax.scan closes over this main_grad, .* carry the main_grad"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.grad(loss)(main_grad)
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.grad(jax.jit(loss))(main_grad)


def test_one_accumulator_in_two_branches_is_right():
    x, w, main_grad = operands()

    def loss(main_grad, choice):
        return jnp.sum(
            lax.cond(
                choice,
                lambda: ub.linear(x, w, main_grad=main_grad),
                lambda: ub.linear(2 * x, w, main_grad=main_grad),
            )
        )

    for choice, factor in ((True, 1), (False, 2)):
        found = jax.jit(jax.grad(loss))(main_grad, choice)
        assert_equal(found, main_grad + factor * (x.T @ jnp.ones((8, 24))))


def test_one_accumulator_in_one_step_after_another_is_right():
    x, w, main_grad = operands()
    step = lambda m: jax.grad(lambda m: jnp.sum(ub.linear(x, w, main_grad=m)))(m)  # noqa: E731
    expected = main_grad + 2 * (x.T @ jnp.ones((8, 24)))
    assert_equal(jax.jit(lambda m: step(step(m)))(main_grad), expected)
    assert_equal(step(step(main_grad)), expected)


def test_claims_vanish_with_their_tracers():
    from jax_ub._src.primitives.claims import _USED

    x, w, main_grad = operands()
    jax.jit(jax.grad(lambda m: jnp.sum(ub.linear(x, w, main_grad=m))))(main_grad)
    gc.collect()
    assert not _USED


@covering(kind_and_method=KINDS_AND_METHODS, check_vma=[True, False])
def test_accumulator_that_is_not_mapped_as_its_gradient_is_refused(
    kind_and_method, check_vma
):
    kind, method = kind_and_method
    call = layer(kind, method, tp_mesh(2))

    def gradient(xs, w, main_grad):
        apply = lambda m: jax.vmap(lambda x: call(x, w, m))(xs)  # noqa: E731
        return jax.grad(lambda m: jnp.sum(apply(m)))(main_grad)

    x_spec, w_spec, _ = KINDS[kind]
    specs = (P(None, *x_spec), w_spec, w_spec)
    run = on_ranks(gradient, tp_mesh(2), specs, w_spec, check_vma=check_vma)
    _, w, main_grad = operands()
    message = "jax.vmap over 3 examples maps the gradient .* and would count it 3 times"
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=message):
        run(small_integers(0, (3, 8, 16)), w, main_grad)


def test_accumulator_that_one_of_two_vmaps_maps_is_refused():
    _, w, main_grad = operands()
    xs = small_integers(0, (3, 5, 8, 16))
    of_x = jax.vmap(lambda x, m: ub.linear(x, w, main_grad=m))
    loss = lambda m, xs: jnp.sum(jax.vmap(of_x, (0, None))(xs, m))  # noqa: E731
    message = "jax.vmap over 3 examples"
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=message):
        jax.grad(loss)(jnp.stack(5 * [main_grad]), xs)


def test_accumulators_that_are_mapped_are_right():
    _, w, _ = operands()
    xs, main_grads = small_integers(0, (3, 8, 16)), small_integers(1, (3, 16, 24))
    apply = jax.vmap(lambda x, m: ub.linear(x, w, main_grad=m))
    step = jax.jit(jax.grad(lambda m: jnp.sum(apply(xs, m))))
    expected = main_grads + jnp.swapaxes(xs, 1, 2) @ jnp.ones((8, 24))
    assert_equal(step(main_grads), expected)


def test_accumulator_must_fit_its_kernel():
    x, w, main_grad = operands()
    error = ub.errors.ShapeContractError
    with pytest.raises(error, match=r"main_grad has shape \(24, 16\), but here it is"):
        ub.linear(x, w, main_grad=main_grad.T)
    with pytest.raises(error, match="main_grad is bfloat16, but gradients are accum"):
        ub.linear(x, w, main_grad=main_grad.astype("bfloat16"))
    with pytest.raises(error, match="main_grad is one array, but w is a tuple of 1"):
        on_ranks(
            lambda x, w, m: ub.all_gather_matmul(x, (w,), axis_name="tp", main_grad=m),
            tp_mesh(2),
            (P("tp"), P(None, "tp"), P(None, "tp")),
            P(None, "tp"),
        )(x, w, main_grad)
