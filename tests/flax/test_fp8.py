"""`fp8=` of the nnx and linen layers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import linen as nn
from flax import nnx
from flax_models import random_layer, random_model, random_variables
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import (
    call_lines,
    calls,
    compiled_text,
    dp_tp_mesh,
    scale_calls,
    tp_mesh,
)
from scaled_operands import DEFAULT_RECIPES as RECIPES

import jax_ub as ub
from jax_ub.errors import (
    ConfigurationError,
    ShapeContractError,
    UnsupportedOverlapError,
)
from jax_ub.flax import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiHeadAttention,
    OverwriteWithGradient,
    TransformerLayer,
    linen,
)

FP8 = ub.fp8
LAYERS = {
    "column": lambda **o: Linear(64, 64, parallel="column", **o),
    "row": lambda **o: Linear(64, 64, parallel="row", **o),
    "head": lambda **o: LayerNormLinear(64, 64, parallel="column", **o),
    "mlp": lambda **o: LayerNormMLP(64, 128, **o),
    "attention": lambda **o: MultiHeadAttention(4, 64, **o),
    "transformer": lambda **o: TransformerLayer(64, 128, 4, **o),
}
# A transformer layer has an MLP and attention.
SAMPLE = ["column", "row", "transformer", *nightly("mlp", "attention")]
X = normal(0, (2, 32, 64))


def layer(name, **options):
    """Returns a layer with random parameters."""
    return random_layer(LAYERS[name], **options)


def value_and_gradients(model, x, prepare=lambda params, states: params):
    """Returns the loss, and its gradients by parameters and by FP8 states.

    `prepare` maps the parameters to those that the model is called with.
    """
    graph, params, states = nnx.split(model, nnx.Param, OverwriteWithGradient)

    @jax.jit
    def run(params, states, x):
        def loss(params, states):
            y = nnx.merge(graph, prepare(params, states), states)(x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1))(params, states)

    loss, gradients = run(params, states, x)
    return loss, *gradients, (run, params, states)


def relative_error(found, wanted):
    found, wanted = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (found, wanted)
    )
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@covering(name=["head", *SAMPLE], recipe=RECIPES)
def test_every_layer_is_close_to_f32(name, recipe):
    mesh = tp_mesh(2)
    with jax.set_mesh(mesh):
        plain = layer(name)
        model = layer(name, fp8=RECIPES[recipe])
        wanted = value_and_gradients(plain, X)
        found = value_and_gradients(model, X)
    assert abs(found[0] - wanted[0]) < 0.05 * wanted[0]
    # e5m2 gradients have an error of 0.07 for each product of the backward pass.
    error = relative_error(found[1], wanted[1])
    assert 1e-4 < error < 0.2


def test_the_states_of_all_layers_are_updated():
    recipe = RECIPES["delayed"]
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        model = layer("transformer", fp8=recipe)
        _, _, new, (run, params, states) = value_and_gradients(model, X)
        updated = FP8.apply_updates(states, new)
        (_, (_, newer)) = run(params, updated, X)
        final = FP8.apply_updates(updated, newer)
    flat = dict(nnx.to_flat_state(final))
    paths = {path[:-1] for path in flat}
    assert len(paths) == 6
    changed = [
        path
        for path in paths
        if float(flat[*path, "kernel_scale"][...][0]) != 1
        and float(flat[*path, "output_grad_scale"][...][0]) != 1
        and np.all(flat[*path, "input_amax_history"][...] > 0)
    ]
    # Query, key and value share one all-gather, and the state of the query.
    assert len(changed) == 4


@pytest.mark.parametrize("fsdp_axes", ["dp", *nightly(())])
def test_replicas_whose_values_differ_10000_fold_share_a_state(fsdp_axes):
    factors = np.float32([1, 1e4])[:, None, None]
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        model = layer("row", fp8=RECIPES["delayed"], fsdp_axes=fsdp_axes)
        graph, params, states = nnx.split(model, nnx.Param, OverwriteWithGradient)

        def loss(states, x, dy):
            return jnp.sum(nnx.merge(graph, params, states)(x) * dy)

        x, dy = (jax.device_put(X * each, P("dp")) for each in (factors, factors[::-1]))
        new = jax.jit(jax.grad(loss))(states, x, dy)["fp8_state"]
    for array, role in (
        (x, "input"),
        (dy, "output_grad"),
        (params["kernel"], "kernel"),
    ):
        history = new[f"{role}_amax_history"][...]
        np.testing.assert_array_equal(history, [np.max(np.abs(array[...])), 0])


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_nothing_falls_back(library):
    ub.fallbacks(clear=True)
    with jax.set_mesh(tp_mesh(2)):
        if library == "nnx":
            model = layer("transformer", fp8=RECIPES["current"])
            *_, (run, params, states) = value_and_gradients(model, X)
            text = compiled_text(run, params, states, X)
        else:
            model = linen.TransformerLayer(64, 128, 4, fp8=RECIPES["current"])
            gradient = jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2))
            text = compiled_text(jax.jit(gradient), random_variables(model, X), X)
    assert not ub.fallbacks(clear=True)
    found = calls(text)
    assert found["all_gather_matmul"] == found["matmul_reduce_scatter"] == 4
    lines = call_lines(text)
    assert lines
    assert all("has_scales = 1" in line for line in lines)
    assert scale_calls(text) == 8  # of four linears, forward and backward


@pytest.mark.parametrize("recipe", ["delayed", *nightly("current")])
def test_fsdp(recipe):
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        plain, model = (
            layer("column", **options)
            for options in ({}, {"fsdp_axes": "dp", "fp8": RECIPES[recipe]})
        )
        wanted, found = (value_and_gradients(each, X) for each in (plain, model))
    assert relative_error(found[1], wanted[1]) < 0.1


class Pair(nnx.Module):
    def __init__(self, **options):
        options = {"rngs": nnx.Rngs(0), "use_bias": False, **options}
        self.up = Linear(64, 128, parallel="column", **options)
        self.down = Linear(128, 64, parallel="row", **options)

    def __call__(self, x):
        return self.down(self.up(x))


def pair(**options):
    """Returns two layers with random parameters."""
    return random_model(lambda: Pair(**options))


@covering(
    recipe=["block", *nightly("current", "delayed", "row")],
    layout=[(4, "float32"), *nightly((2, "float32"), (4, "bfloat16"))],
)
def test_two_layers_with_fsdp_compute_what_they_do_without(recipe, layout):
    """With four shards, a shard has half a block of MXFP8 along K."""
    num_shards, dtype = layout
    with jax.set_mesh(dp_tp_mesh(num_shards, 2)):
        x = normal(0, (4, 32, 64), dtype)
        options = {"fp8": RECIPES[recipe], "dtype": dtype}
        wanted, found = (
            value_and_gradients(pair(**options, **fsdp), x)[:3]
            for fsdp in ({}, {"fsdp_axes": "dp"})
        )
    assert found[0] == wanted[0]
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert relative_error(found[1], wanted[1]) < tolerance
    jax.tree.map(assert_equal, found[2], wanted[2])  # states


@pytest.mark.parametrize("recipe", ["block", *nightly("current", "delayed", "row")])
def test_fsdp_sends_and_saves_one_byte_per_element(recipe):
    """In a scan over layers, the forward pass saves shards, not whole kernels."""
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        model = pair(fp8=RECIPES[recipe], fsdp_axes="dp", dtype=jnp.bfloat16)
        graph, params = nnx.split(model)

        def loss(params, x):
            def body(x, params):
                return nnx.merge(graph, params)(x), None

            return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
        x = jax.device_put(normal(0, (4, 32, 64), jnp.bfloat16), P("dp", "tp"))
        text = compiled_text(jax.jit(jax.grad(loss)), stacked, x)
    gathered = re.findall(r"= (\w+)\[64,64\]\S* all-gather\(", text)
    assert gathered == ["u8"] * 4  # each kernel, forward and backward
    assert "u8[3,32,64]" in text
    assert "u8[3,64,32]" in text
    assert "u8[3,64,64]" not in text


@pytest.mark.parametrize("recipe", ["row", *nightly("current", "block")])
@pytest.mark.parametrize("library", ["nnx", *nightly("linen")])
def test_fsdp_layers_in_a_scan_under_a_policy_that_saves_everything(library, recipe):
    options = {"fp8": RECIPES[recipe], "use_bias": False, "fsdp_axes": "dp"}
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        if library == "nnx":
            graph, params = nnx.split(pair(**options))
        else:
            up = linen.Linear(128, parallel="column", **options)
            model = nn.Sequential([up, linen.Linear(64, parallel="row", **options)])
            params = random_variables(model, X)

        def layers(params, x):
            if library == "nnx":
                return nnx.merge(graph, params)(x)
            return model.apply(params, x)

        def loss(params, layers):
            def body(x, _):
                return layers(params, x), None

            y, _ = jax.lax.scan(body, X, None, length=2)
            return jnp.mean(y**2)

        policy = jax.checkpoint_policies.everything_saveable
        saving = jax.checkpoint(layers, policy=policy)
        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        wanted, found = (step(params, each) for each in (layers, saving))
    assert np.isfinite(wanted[0])
    assert found[0] == wanted[0]
    assert relative_error(found[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("recipe", ["delayed", *nightly("row", "current", "block")])
def test_linen_layers_and_their_state(recipe):
    x = X
    options = {"fp8": RECIPES[recipe]}
    plain, model = (
        linen.TransformerLayer(64, 128, 4, **each) for each in ({}, options)
    )
    with jax.set_mesh(tp_mesh(2)):
        variables = random_variables(model, x)
        params, state = variables["params"], variables.get("_overwrite_with_gradient")
        assert (state is not None) == (recipe == "delayed")

        def loss(params, state, model):
            variables = {"params": params}
            if state is not None:
                variables["_overwrite_with_gradient"] = state
            return jnp.mean(model.apply(variables, x) ** 2)

        grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        found, new = grad(params, state, model)
        wanted, _ = grad(params, None, plain)
    assert 1e-4 < relative_error(found, wanted) < 0.2
    if state is not None:
        updated = jax.tree_util.tree_leaves_with_path(FP8.apply_updates(state, new))
        names = [(str(path[-1].key), leaf) for path, leaf in updated]
        histories = [leaf for name, leaf in names if name == "input_amax_history"]
        # Query, key and value share one all-gather, and the state of the query.
        assert len(histories) == 6
        assert sum(float(history[0]) > 0 for history in histories) == 4


def test_a_wrong_recipe():
    for name in ("mlp", "column"):
        with pytest.raises(ConfigurationError, match="fp8 = 'hybrid' is not"):
            LAYERS[name](rngs=nnx.Rngs(0), fp8="hybrid")


def is_kernel(path, _):
    return "kernel" in jax.tree_util.keystr(path)


def given_kernels(recipe, params, states):
    """Quantizes all kernels, by their states if the recipe has some."""
    if not isinstance(recipe, FP8.DelayedScaling):
        return FP8.quantize_params(params, recipe, select=is_kernel)
    flat = dict(nnx.to_flat_state(params))
    of_states = dict(nnx.to_flat_state(states))
    for path, kernel in flat.items():
        if path[-1] == "kernel":
            prefix = (*path[:-1], "fp8_state")
            state = {name: of_states[*prefix, name][...] for name in KERNEL_STATE}
            state = {**FP8.init_state(recipe), **state}
            w = ub.quantize(kernel[...], recipe, role="kernel", state=state)
            flat[path] = kernel.replace(w)
    return nnx.from_flat_state(flat)


KERNEL_STATE = ("kernel_scale", "kernel_amax_history")


@covering(name=[*SAMPLE, *nightly("head")], recipe=["current", "delayed"])
def test_layers_take_kernels_that_are_quantized_already(name, recipe):
    """Results, gradients and states are those of layers that quantize their kernels.

    If the layer quantizes the kernels of query, key and value, they have one scale.
    """
    recipe, has_other_scales = RECIPES[recipe], name in ("attention", "transformer")
    with jax.set_mesh(tp_mesh(2)):
        model = layer(name, fp8=recipe)
        wanted, gradients, old, _ = value_and_gradients(model, X)
        prepare = functools.partial(given_kernels, recipe)
        found, of_given, new, _ = value_and_gradients(model, X, prepare)
    rtol = 0.1 if has_other_scales else 1e-5
    assert relative_error(found, wanted) < rtol
    assert relative_error(of_given, gradients) < rtol
    if recipe is RECIPES["delayed"]:
        new, old = (dict(nnx.to_flat_state(states)) for states in (new, old))
        for path in new:
            if not {"key", "value", "query"} & {*path}:
                np.testing.assert_allclose(new[path][...], old[path][...], rtol=rtol)


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_shards_of_a_given_kernel_must_have_one_scale(parallel):
    options = {"fsdp_axes": "dp", "fp8": RECIPES["current"], "use_bias": False}
    layer = Linear(64, 32, parallel=parallel, rngs=nnx.Rngs(0), **options)
    graph, params = nnx.split(layer)

    def forward(axis_name):
        def call(params, x):
            given = FP8.quantize_params(params, axis_name=axis_name, select=is_kernel)
            return nnx.merge(graph, given)(x)

        spec = P("dp", "tp") if parallel == "column" else P("tp", "dp")
        specs = jax.tree.map(lambda _: spec, params)
        x_spec, y_spec = P(("dp", "tp")), P("dp", "tp")
        if parallel == "row":
            x_spec, y_spec = y_spec, x_spec
        return jax.shard_map(
            call, mesh=dp_tp_mesh(2, 2), in_specs=(specs, x_spec), out_specs=y_spec
        )

    x = normal(0, (16, 64))
    text = (
        r"w has one scale per tensor, which differs over \('dp',\). Pass axis_name to"
    )
    with pytest.raises(ShapeContractError, match=text):
        jax.eval_shape(forward("tp"), params, x)
    wanted = x @ layer.kernel[...]
    assert relative_error(jax.jit(forward(("dp", "tp")))(params, x), wanted) < 0.045


@pytest.mark.parametrize("library", ["linen", *nightly("nnx")])
def test_a_step_quantizes_kernels_once_for_all_microbatches(library):
    recipe = RECIPES["current"]
    with jax.set_mesh(tp_mesh(2)):
        if library == "nnx":
            graph, params = nnx.split(layer("mlp", fp8=recipe))
        else:
            model = linen.LayerNormMLP(64, 128, fp8=recipe)
            params = random_variables(model, X)

        def loss(params, x):
            if library == "nnx":
                return jnp.mean(nnx.merge(graph, params)(x) ** 2)
            return jnp.mean(model.apply(params, x) ** 2)

        def step(params, xs):
            given = FP8.quantize_params(params, recipe, select=is_kernel)

            def microbatch(total, x):
                gradients = jax.grad(loss)(given, x)
                gradients = jax.tree.map(
                    lambda g: g.source if isinstance(g, ub.ScaledArray) else g,
                    gradients,
                    is_leaf=lambda g: isinstance(g, ub.ScaledArray),
                )
                return jax.tree.map(jnp.add, total, gradients), None

            return jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), xs)[0]

        xs = jnp.stack([X, 2 * X, X])
        run = jax.jit(step)
        text = compiled_text(run, params, xs)
        found = run(params, xs)
        total = jax.grad(lambda params: sum(loss(params, x) for x in xs))
        wanted = jax.jit(total)(params)
    assert relative_error(found, wanted) < 0.02
    # Kernels [64, 128 / 2] and [128 / 2, 64].
    casts = re.findall(r"= f8e4m3fn\[64,64\]\S* convert\(", text)
    body = re.search(r"body=(%?[\w.\-]+)", text)[1]
    (loop,) = (c for c in text.split("\n\n") if c.strip().startswith(f"{body} "))
    assert len(casts) == 2
    assert not re.findall(r"= f8e4m3fn\[64,64\]\S* (convert|fusion)\(", loop)


@covering(axis_type=["Explicit", "Auto"], recipe=["block", "row", "current"])
def test_kernels_that_are_quantized_already_are_sharded_by_fsdp(axis_type, recipe):
    recipe, axis_types = RECIPES[recipe], (getattr(AxisType, axis_type),) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=axis_types)
    with jax.set_mesh(mesh):
        graph, params = nnx.split(pair(fp8=recipe, fsdp_axes="dp"))
        x = jax.device_put(normal(0, (4, 32, 64)), P("dp", "tp"))

        def loss(params, is_given):
            if is_given:
                params = FP8.quantize_params(params, recipe)
            return jnp.mean(nnx.merge(graph, params)(x) ** 2)

        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        wanted, found = (step(params, is_given) for is_given in (False, True))
    assert relative_error(found[0], wanted[0]) < 1e-5
    assert relative_error(found[1], wanted[1]) < 1e-5


def test_a_layer_with_given_kernels_is_not_exported_with_symbolic_sizes():
    recipe = RECIPES["current"]
    with jax.set_mesh(tp_mesh(2)):
        graph, params = nnx.split(layer("column", fp8=recipe))
        given = FP8.quantize_params(params, recipe)
        (tokens,) = jax.export.symbolic_shape("2*n")
        x = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
        function = jax.jit(lambda x: nnx.merge(graph, given)(x))
        text = "once for each size, or pass the arrays from which the kernels were"
        with pytest.raises(UnsupportedOverlapError, match=text):
            jax.export.export(function)(x)


@pytest.mark.parametrize(
    ("name", "parameter"), [("column", "kernel"), ("attention", "bias")]
)
def test_parameters_that_are_quantized_already_are_rejected(name, parameter):
    text = rf"{parameter} is a ub\.ScaledArray, .* Pass {parameter}\.source; with fp8"
    with jax.set_mesh(tp_mesh(2)):
        graph, params = nnx.split(layer(name))
        model = nnx.merge(graph, FP8.quantize_params(params))
        with pytest.raises(ShapeContractError, match=text):
            model(X)
        module = {
            "column": linen.Linear(64, parallel="column"),
            "attention": linen.MultiHeadAttention(4),
        }[name]
        variables = FP8.quantize_params(random_variables(module, X))
        with pytest.raises(ShapeContractError, match=text):
            module.apply(variables, X)
