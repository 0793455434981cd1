"""`fp8=` of `ops.BasicLinear` and `ops.Linear`, fused and unfused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from ops_on_ranks import TOKENS, random_params
from programs import calls, compiled_text, equations, on_ranks, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES
from scaled_operands import DELAYED, PASSED_ON, with_maximum_as_sum

import jax_ub as ub
from jax_ub import ops
from jax_ub.errors import (
    ConfigurationError,
    ShapeContractError,
    UnsupportedOverlapError,
)

FP8 = ub.fp8
X, DY = normal(0, (16, 64)), normal(9, (16, 64))


def linear(mode, size_in, size_out, name, **options):
    if name is not None:
        options["userbuffers_options"] = {"comm_name": name}
    return ops.BasicLinear(
        size_in,
        size_out,
        tensor_parallel_mode=mode,
        sequence_parallel=mode is not None,
        **options,
    )


def pair(recipe, fused, **options):
    first, second = ("fc1", "fc2") if fused else (None, None)
    options["fp8"] = recipe
    return ops.Sequential(
        linear("column", 64, 128, first, **options),
        ops.ReLU(),
        linear("row", 128, 64, second, **options),
    )


def functions_of(recipe):
    """Returns the same pair of layers by functions of jax_ub."""
    options = {"axis_name": "tp", "fp8": recipe}

    def call(params, x):
        (first, _, second), options_of = params, dict(options)
        states = (
            {k: v for k, v in each.items() if k != "kernel"} or None
            for each in (first, second)
        )
        y = ub.all_gather_matmul(
            x, first["kernel"], fp8_state=next(states), **options_of
        )
        y = jnp.maximum(y, 0)
        return ub.matmul_reduce_scatter(
            y, second["kernel"], fp8_state=next(states), **options_of
        )

    return call


def run(function, specs, num_ranks=2):
    """Returns a function (params, x) -> y, and gradients of params and x."""
    layer = on_ranks(function, tp_mesh(num_ranks), (specs, TOKENS), TOKENS)

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(y * DY), y

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    return jax.jit(lambda params, x: gradient(params, x)[::-1])


def assert_close(found, wanted):
    """Compares two trees up to the order of sums, and the rounding of scales."""
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


@covering(recipe=PASSED_ON, fused=[True, False])
def test_linears_equal_the_functions(recipe, fused):
    recipe = RECIPES[recipe]
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    seq = pair(recipe, fused)
    params = random_params(seq)
    assert {*params[0]} == {"kernel", *FP8.init_state(recipe)}
    step = run(seq, seq.specs())
    plain = run(functions_of(recipe), seq.specs())
    assert_close(step(params, X), plain(params, X))
    text = compiled_text(step, params, X)
    assert "f8e4m3fn[" in text
    if fused and recipe in (RECIPES["current"], DELAYED):
        found = calls(text)
        assert found["all_gather_matmul"] >= 2
        assert not {"matmul", "all_gather", "reduce_scatter"} & set(found)


@pytest.mark.parametrize("fused", [True, *nightly(False)])
def test_the_gradient_of_a_state_is_its_new_value(fused):
    seq = pair(DELAYED, fused)
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    weights, states = ops.split_fp8_states(random_params(seq))
    step = run(seq, seq.specs())
    for _ in range(2):
        _, (gradients, _) = step(ops.merge_fp8_states(weights, states), X)
        states = FP8.apply_updates(states, ops.split_fp8_states(gradients)[1])
    first, _, second = states
    assert_equal(first["input_amax_history"], jnp.full(2, jnp.max(jnp.abs(X))))
    assert_equal(second["output_grad_amax_history"], jnp.full(2, jnp.max(jnp.abs(DY))))
    for name in ("input", "kernel", "output_grad"):
        assert float(second[f"{name}_scale"][0]) not in (0.0, 1.0)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_microbatches_share_a_state_whose_sum_is_the_maximum(fused):
    seq = pair(DELAYED, fused)
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    arguments = (*ops.split_fp8_states(random_params(seq)), X)
    specs = (*ops.split_fp8_states(seq.specs()), P("tp"))

    def step(convert):
        def loss(states, weights, x):
            params = ops.merge_fp8_states(weights, convert(states))
            losses = jax.lax.map(
                lambda factor: jnp.sum(seq(params, factor * x)),
                jnp.asarray([1.0, 8.0, 2.0]),
            )
            return jnp.sum(losses)

        def gradient(weights, states, x):
            return jax.grad(loss)(states, weights, x)

        return on_ranks(gradient, tp_mesh(2), specs, specs[1])(*arguments)

    first, _, second = step(with_maximum_as_sum)
    assert_equal(first["input_amax_history"][0], 8 * jnp.max(jnp.abs(X)))
    assert_equal(second["output_grad_amax_history"], jnp.eye(2)[0])
    text = "jax.lax.scan closes over this FP8 state"
    with pytest.raises(ShapeContractError, match=text):
        step(lambda states: states)


def state_of(params):
    return {name: value for name, value in params.items() if name != "kernel"}


@pytest.mark.parametrize("recipe", ["delayed", *nightly("row", "current", "block")])
def test_all_fusions(recipe):
    """FP8 linears are fused with residuals, biases, scales and activations."""
    recipe = RECIPES[recipe]

    def block(name):
        skip = ops.MakeExtraOutput(in_place=True)
        options = {} if name is None else {"userbuffers_options": {"comm_name": name}}
        return ops.Sequential(
            skip.with_extra_output_channel(0, "skip", False),
            ops.Linear(
                64,
                64,
                tensor_parallel_mode="column",
                sequence_parallel=True,
                fp8=recipe,
                **options,
            ),
            ops.ReLU(),
            ops.BasicLinear(64, 64, fp8=recipe),
            ops.ConstantScale(0.5),
        )

    specs = block(None).specs()
    # The features of the local linear are whole on every rank.
    specs = (specs[0], jax.tree.map(lambda _: P(), specs[1]), *specs[2:])
    seq = block(None)
    params = random_params(seq)
    layer = functools.partial(run, specs=specs, num_ranks=1)
    fused = layer(seq)(params, X)
    with ops.without_fusions():
        unfused = layer(block(None))(params, X)
    # Fused, the last linear quantizes the gradient before it is scaled.
    assert_close(*(ops.split_fp8_states(each)[0] for each in (fused, unfused)))


def test_main_grads_accumulate():
    options = {"accumulate_into_main_grad": True}
    seq = pair(RECIPES["current"], fused=True, **options)
    plain = pair(RECIPES["current"], fused=True)
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    params = random_params(seq)
    kernels = tuple({k: v for k, v in p.items() if k == "kernel"} for p in params)
    _, (found, _) = run(seq, seq.specs())(params, X)
    _, (wanted, _) = run(plain, plain.specs())(kernels, X)
    for i in (0, 2):
        np.testing.assert_allclose(
            found[i]["main_grad"], wanted[i]["kernel"], rtol=1e-6, atol=1e-5
        )
        assert not np.any(found[i]["kernel"])


def test_a_vector_and_a_frozen_kernel():
    layer = ops.BasicLinear(64, 32, fp8=DELAYED)
    seq = ops.Sequential(layer)
    params = random_params(seq)
    vector = X[0]

    def loss(params, x):
        return jnp.sum(seq(params, x) ** 2)

    found = jax.jit(jax.grad(loss, (0, 1)))(params, vector)
    wanted = jax.jit(jax.grad(loss, (0, 1)))(params, vector[None])
    assert_equal(found[0], wanted[0])
    assert_equal(found[1], wanted[1][0])
    (kernel,) = ({"kernel": params[0]["kernel"]},)
    new = jax.grad(lambda s: loss(({**kernel, **s},), X))(state_of(params[0]))
    assert float(new["output_grad_amax_history"][0]) > 0


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="BasicLinear: fp8 = 'hybrid' is"):
        ops.BasicLinear(64, 64, fp8="hybrid")
    seq = ops.Sequential(ops.BasicLinear(64, 64, fp8=DELAYED))
    (params,) = random_params(seq)
    text = r"params has \['kernel'\], but the operation has .* 'input_scale'"
    with pytest.raises(ShapeContractError, match=text):
        seq(({"kernel": params["kernel"]},), X)

    def twice(state):
        params_of = ({"kernel": params["kernel"], **state},)
        return jnp.sum(seq(params_of, seq(params_of, X)))

    with pytest.raises(ShapeContractError, match="this FP8 state went into another"):
        jax.grad(twice)(state_of(params))


def test_a_state_that_no_gradient_reaches_is_a_warning():
    seq = ops.Sequential(ops.BasicLinear(64, 32, fp8=DELAYED))
    (params,) = random_params(seq)
    state = state_of(params)

    def loss(kernel):
        return jnp.sum(seq(({"kernel": kernel, **state},), X) ** 2)

    with pytest.warns(
        UserWarning, match="BasicLinear: JAX takes the gradient of the k"
    ):
        jax.grad(loss)(params["kernel"])


def given_kernels(params, recipe, axis_name="tp"):
    """Quantizes the kernels of all operations, by their states if they have some."""

    def of_one(params):
        if "kernel" not in params:
            return params
        kernel = ub.quantize(
            params["kernel"],
            recipe,
            role="kernel",
            state={k: params[k] for k in FP8.init_state(recipe)} or None,
            axis_name=axis_name,
        )
        return {**params, "kernel": kernel}

    return tuple(map(of_one, params))


@covering(recipe=PASSED_ON, fused=[True, False], quantizes_x=[True, False])
def test_kernels_may_be_quantized_already(recipe, fused, quantizes_x):
    """Results, gradients and states are those of operations that quantize kernels."""
    recipe = RECIPES[recipe]
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    seq = pair(recipe, fused)
    if quantizes_x:
        seq = ops.Sequential(ops.Quantize(), seq[0], ops.ReLU(), ops.Quantize(), seq[2])
    params = random_params(seq)
    wanted = run(seq, seq.specs())(params, X)
    step = run(lambda params, x: seq(given_kernels(params, recipe), x), seq.specs())
    found = step(params, X)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_equal(*(jax.tree.leaves(each) for each in (found, wanted)))


def casts_of_kernels(function, *operands):
    """Returns how many kernels `[64, 64]` a function converts to FP8."""
    return sum(
        equation.primitive.name == "jax_ub_cast"
        and equation.params["dtype"] == jnp.float8_e4m3fn
        and equation.outvars[0].aval.shape == (64, 64)
        for equation in equations(function, *operands)
    )


@pytest.mark.filterwarnings("ignore:.* not of the FP8 state")  # it is a constant here
@covering(recipe=["delayed", *nightly("current")], fused=[False, *nightly(True)])
def test_a_step_quantizes_kernels_once_for_all_microbatches(recipe, fused):
    recipe = RECIPES[recipe]
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    seq = pair(recipe, fused)
    plain = random_params(seq)
    xs = jnp.stack([X, 2 * X, X])

    def losses(params, xs):
        return jax.lax.map(lambda x: jnp.sum(seq(params, x) ** 2), xs)

    def given(params, xs):
        return losses(given_kernels(params, recipe), xs)

    def gradients(function):
        specs = (seq.specs(), P(None, "tp"))
        layer = on_ranks(
            lambda *operands: jax.lax.psum(function(*operands), "tp"),
            tp_mesh(2),
            specs,
            P(),
        )
        return jax.grad(
            lambda weights, states: jnp.sum(
                layer(ops.merge_fp8_states(weights, states), xs)
            )
        )

    operands = ops.split_fp8_states(plain)
    found, wanted = (jax.jit(gradients(f))(*operands) for f in (given, losses))
    assert_close(found, wanted)
    assert casts_of_kernels(gradients(given), *operands) == 2


def test_main_grads_of_quantized_kernels_accumulate():
    recipe = RECIPES["current"]
    seq = pair(recipe, fused=True, accumulate_into_main_grad=True)
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    weights, main_grads = ops.split_main_grads(random_params(seq))
    specs, main_grad_specs = ops.split_main_grads(seq.specs())
    xs = jnp.stack([X, 2 * X])

    def accumulate(weights, main_grads, xs, *, is_given):
        if is_given:
            weights = given_kernels(weights, recipe)
            weights = jax.tree.map(jax.lax.stop_gradient, weights)

        def step(main_grads, x):
            def loss(main_grads):
                return jnp.sum(seq(ops.merge_main_grads(weights, main_grads), x) ** 2)

            return jax.grad(loss)(main_grads), None

        return jax.lax.scan(step, main_grads, xs)[0]

    def run(is_given):
        function = functools.partial(accumulate, is_given=is_given)
        in_specs = (specs, main_grad_specs, P(None, "tp"))
        return jax.jit(on_ranks(function, tp_mesh(2), in_specs, main_grad_specs))

    found, wanted = (run(each)(weights, main_grads, xs) for each in (True, False))
    assert np.any(found[0]["main_grad"])
    assert_close(found, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32")])
def test_the_gradient_of_a_quantized_kernel_has_the_dtype_of_its_source(dtype):
    seq = ops.Sequential(ops.Linear(64, 32, fp8=RECIPES["current"]))
    (params,) = random_params(seq)
    source = params["kernel"].astype(dtype)
    kernel = ub.quantize(source, role="kernel")

    def loss(kernel):
        return jnp.sum(seq(({**params, "kernel": kernel},), X) ** 2)

    gradient = jax.grad(loss)(kernel)
    assert gradient.source.dtype == dtype
    assert_equal(gradient.source, jax.grad(loss)(source))
    frozen = ub.ScaledArray(kernel.values, kernel.scales)
    assert loss(frozen) == loss(source)


def test_quantized_kernels_that_do_not_fit():
    recipe = RECIPES["current"]
    layer = ops.Linear(64, 32, fp8=recipe)
    params = random_params(layer)
    kernel = ub.quantize(params["kernel"], recipe, role="kernel")

    def loss(kernel, layer=layer, **others):
        return jnp.sum(
            ops.Sequential(layer)(({**params, "kernel": kernel, **others},), X)
        )

    text = "Linear: kernel is a ub.ScaledArray, but only kernels of linears with fp8="
    for wrong in (ops.Linear(64, 32), ops.BasicLinear(64, 32)):
        with pytest.raises(ShapeContractError, match=text):
            loss(kernel, wrong)
    text = r"Linear: bias is a ub.ScaledArray, .* Pass bias.source"
    with pytest.raises(ShapeContractError, match=text):
        loss(kernel, bias=ub.quantize(params["bias"]))
    text = "BasicLinear: w is float8_e5m2, but kernels of Float8CurrentScaling are"
    with pytest.raises(ShapeContractError, match=text):
        loss(ub.quantize(params["kernel"], recipe, role="output_grad"))
    text = r"BasicLinear: w has scales of shape \(64, 1\) for values"
    with pytest.raises(ShapeContractError, match=text):
        loss(ub.quantize(params["kernel"], RECIPES["row"]))
    text = r"BasicLinear: kernel has shape \(32, 64\)"
    with pytest.raises(ShapeContractError, match=text):
        loss(ub.quantize(params["kernel"].T, recipe, role="kernel"))
    text = "BasicLinear: kernel is FP8 and has no source to receive a gradient"
    with pytest.raises(UnsupportedOverlapError, match=text):
        jax.grad(loss, allow_int=True)(ub.ScaledArray(kernel.values, kernel.scales))
