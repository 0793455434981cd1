"""FP8 arrays under `jax.checkpoint`, which must not change their values.

It applies `reduce_precision` to variables that it saves and that the forward pass
reads, which turns float8_e4m3fn values above 240 into NaN. XLA's result is not checked
for each program, only that no jaxpr has such a call.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import equations, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES
from scaled_operands import quantized

import jax_ub as ub
from jax_ub import ops

SIZE = 64
POLICIES = {
    "all": jax.checkpoint_policies.everything_saveable,
    "none": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("jax_ub.x", "jax_ub.w"),
}


def with_recipe(recipe, x, w, parallel):
    state = ub.fp8.init_state(recipe) or None
    options = {"axis_name": "tp", "fp8": recipe, "fp8_state": state}
    return ub.linear(x, w, parallel=parallel, **options)


def with_operands(recipe, x, w, parallel):
    x, w = quantized(recipe, x, w)
    return ub.linear(x, w, parallel=parallel, axis_name="tp")


def with_gathered(recipe, x, w, parallel):
    x, w = quantized(recipe, x, w)
    if parallel == "row":
        return ub.linear(x, w, parallel="row", axis_name="tp")
    y, gathered = ub.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)
    return y + ub.linear(lax.stop_gradient(gathered), w)


def with_operations(recipe, x, w, parallel, *quantizers):
    options = {"tensor_parallel_mode": parallel, "axis_name": "tp"}
    size = SIZE, SIZE
    linear = ops.BasicLinear(*size, sequence_parallel=True, fp8=recipe, **options)
    params = {"kernel": w, **ub.fp8.init_state(recipe)}
    model = ops.Sequential(*quantizers, linear)
    return model([*({} for _ in quantizers), params], x)


def with_quantize(recipe, x, w, parallel):
    quantizer = ops.Quantize(True, True, fp8=ub.fp8.RowwiseScaling())
    return with_operations(recipe, x, w, parallel, quantizer)


def with_wire(recipe, x, w, parallel):
    name = {"column": "qkv", "row": "proj"}[parallel]
    return ub.linear(x, w, parallel=parallel, axis_name="tp", ub_name=name)


def with_local_ops(recipe, x, w, parallel):
    y = with_recipe(RECIPES["current"], x, w, parallel)
    (x, w) = quantized(RECIPES["current"], y, w)
    if parallel == "column":
        y = ub.dgrad_add(x, w, jnp.zeros((SIZE, SIZE)))
        return y[:, : SIZE // 2]
    return y + ub.wgrad_accumulate(x, x, jnp.zeros((SIZE, SIZE)))[: SIZE // 2]


LAYERS = {
    f.__name__.removeprefix("with_"): f
    for f in (
        with_recipe,
        with_operands,
        with_gathered,
        with_operations,
        with_quantize,
        with_wire,
        with_local_ops,
    )
}


def of_kernels(pair, x, ws):
    """Reuses the kernels in a scan, so that JAX quantizes them in front of it."""
    return lax.scan(lambda x, _: (pair(x, ws), None), x, None, length=2)[0]


def of_activations(pair, x, ws):
    """Reuses the activations, such as for experts or an ensemble."""
    ws = jax.tree.map(lambda w: jnp.stack([w, w]), ws)
    return lax.scan(lambda y, ws: (y + pair(x, ws), None), jnp.zeros_like(x), ws)[0]


def of_layers(pair, x, ws):
    ws = jax.tree.map(lambda w: jnp.stack([w, w]), ws)
    return lax.scan(lambda x, ws: (pair(x, ws), None), x, ws)[0]


def of_one(pair, x, ws):
    return pair(x, ws)


SCANS = {f.__name__: f for f in (of_kernels, of_activations, of_layers, of_one)}


def reduced(function, *operands):
    """Returns how many FP8 arrays `reduce_precision` is applied to."""
    return sum(
        equation.primitive is lax.reduce_precision_p
        and "float8" in str(equation.invars[0].aval.dtype)
        for equation in equations(function, *operands)
    )


def gradient(layer, recipe, scan, inner, outer):
    """Returns the gradient of two layers in a scan, and its operands."""
    mesh = tp_mesh(2)
    if layer == "wire":
        passes = [f"{name}_{p}" for name in ("qkv", "proj") for p in ("fprop", "dgrad")]
        configs = dict.fromkeys(passes, {"wire_dtype": "fp8"})
        ub.initialize_ub([SIZE, SIZE], 2, ub_cfgs=configs, mesh=mesh)
    linear = functools.partial(LAYERS[layer], RECIPES[recipe])

    @functools.partial(jax.checkpoint, policy=POLICIES[inner])
    def pair(x, ws):
        return linear(jnp.sin(linear(x, ws[0], "column")), ws[1], "row")

    @functools.partial(jax.checkpoint, policy=POLICIES[outer])
    def loss(x, ws):
        return lax.psum(jnp.sum(jnp.sin(SCANS[scan](pair, x, ws))), "tp")

    specs = P("tp"), (P(None, "tp"), P("tp"))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    x, *ws = (normal(i, (SIZE, SIZE)) for i in range(3))
    return jax.grad(sharded, (0, 1)), x, tuple(ws)


@pytest.mark.parametrize("scan", ["of_kernels", "of_activations"])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_value_is_reduced_in_nested_checkpoints(layer, scan):
    recipe = "current" if layer == "local_ops" else "row"
    assert not reduced(*gradient(layer, recipe, scan, "all", "all"))


@pytest.mark.filterwarnings("ignore:.*takes the gradient of the kernel, but not")
@covering(layer=LAYERS, recipe=RECIPES, scan=SCANS, inner=POLICIES, outer=POLICIES)
def test_no_value_is_reduced_by_any_policy(layer, recipe, scan, inner, outer):
    assert not reduced(*gradient(layer, recipe, scan, inner, outer))


@pytest.mark.parametrize("layer", sorted(LAYERS.keys() - {"wire"}))
def test_a_scan_stacks_no_fp8_residuals(layer):
    """XLA:CPU would convert the residuals of all layers in each iteration."""
    recipe = "current" if layer == "local_ops" else "block"
    stacked = [
        result.aval.dtype
        for equation in equations(*gradient(layer, recipe, "of_layers", "all", "all"))
        if equation.primitive.name == "scan"
        for result in equation.outvars
    ]
    assert jnp.uint8 in stacked
    assert not [dtype for dtype in stacked if "float8" in str(dtype)]


@pytest.mark.parametrize("layer", ["recipe", "operations", "quantize"])
def test_a_policy_saves_x_once_by_its_name(layer):
    policy = jax.checkpoint_policies.save_only_these_names("jax_ub.x")

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(x, w):
        y = LAYERS[layer](RECIPES["row"], x, w, "column")
        return lax.psum(jnp.sum(jnp.sin(y)), "tp")

    def residuals(x, w):
        return [a[None] for a in jax.tree.leaves(jax.vjp(loss, x, w)[1])]

    specs = P("tp"), P(None, "tp")
    mesh = tp_mesh(2)
    sharded = jax.shard_map(residuals, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    x, w = normal(0, (SIZE, SIZE)), normal(1, (SIZE, SIZE))
    arrays = jax.eval_shape(sharded, x, w)
    saved = [a.dtype for a in arrays if a.shape == (2, SIZE // 2, SIZE)]
    assert saved.count(jnp.uint8) == 1


@pytest.mark.parametrize("op", [ub.dgrad_add, ub.wgrad_accumulate])
def test_ops_without_a_layer_keep_their_values(op):
    x, w = normal(0, (SIZE, SIZE)), normal(1, (SIZE, SIZE))

    def loss(x, w):
        y = op(ub.quantize(x), ub.quantize(w), jnp.zeros((SIZE, SIZE)))
        return jnp.sum(jnp.sin(y))

    saving = jax.checkpoint(loss, policy=POLICIES["all"])
    found, wanted = (
        jax.jit(jax.value_and_grad(each, (0, 1)))(x, w) for each in (saving, loss)
    )
    jax.tree.map(assert_equal, found, wanted)
