import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import assert_trees_close, loss, mesh_of, random_layer, random_model
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub.flax import LayerNormLinear, LayerNormMLP, TransformerLayer

X = (4, 8, 16)
LLAMA = {
    "num_gqa_groups": 2,
    "rotary_base": 1e4,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "use_bias": False,
}


def initialized(**options):
    return TransformerLayer(16, 32, 4, rngs=nnx.Rngs(0, dropout=7), **options)


def layer(**options):
    """Returns a layer with random parameters."""
    return random_layer(TransformerLayer, 16, 32, 4, **options)


def mlp(**options):
    return random_layer(LayerNormMLP, 16, 32, **options)


def run(model, *inputs, **options):
    return nnx.jit(lambda model, *inputs: model(*inputs, **options))(model, *inputs)


class FlaxLayer(nnx.Module):
    """A transformer layer built of Flax's own modules, without a mesh."""

    def __init__(self, rngs):
        self.attention_norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.fc1 = nnx.Linear(16, 32, rngs=rngs)
        self.fc2 = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tri(x.shape[-2], dtype=bool)[None, None]
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.fc2(nnx.gelu(self.fc1(self.norm(x))))


@functools.cache
def of_flax(shape):
    """Returns loss and gradients of `FlaxLayer`."""
    value_and_grad = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    return value_and_grad(FlaxLayer(nnx.Rngs(0)), normal(0, shape))


def by_name(state):
    """Maps parameters to the names of `FlaxLayer`, which has no module for the MLP."""
    state = nnx.to_pure_dict(state)
    mlp = state.pop("mlp", {})
    return {**state, **mlp}


@covering(
    types=["explicit", *nightly("auto")], sequence_parallel=[True, *nightly(False)]
)
def test_values_and_gradients_equal_those_of_flax(types, sequence_parallel):
    x, expected = normal(0, X), of_flax(X)
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = initialized(sequence_parallel=sequence_parallel)
        flax = nnx.state(FlaxLayer(nnx.Rngs(0)))
        assert_equal(by_name(nnx.state(model)), by_name(flax))
        found = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, x)
    assert_trees_close(found[0], expected[0], rtol=1e-4)
    (ours, dx), (theirs, expected_dx) = found[1], expected[1]
    assert_trees_close(by_name(ours), by_name(theirs))
    assert_trees_close(dx, expected_dx)


@covering(options=[{}, LLAMA], method=["auto", "xla"])
def test_a_layer_does_not_need_the_promotion_of_ranks(method, options):
    with jax.set_mesh(mesh_of(2, 2)):
        graph, state = nnx.split(layer(method=method, **options))
        gradients = jax.grad(lambda state, x: loss(nnx.merge(graph, state), x))
        with jax.numpy_rank_promotion("raise"):
            jax.jit(gradients).lower(state, normal(0, X))


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_a_layer_compiles_to_four_calls_and_no_other_communication(types):
    with jax.set_mesh(mesh_of(2, 2, types)):
        graph, state = nnx.split(layer(**LLAMA))
        x = jax.device_put(normal(0, X), P("dp", "tp"))
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = compiled_text(program, state, x)
        y = program(state, x)
    assert calls(text) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
    assert not collectives(text)
    assert tuple(filter(None, y.sharding.spec)) == ("dp", "tp")


def test_inside_shard_map_a_layer_computes_the_same():
    x = normal(0, X)
    graph, state = nnx.split(layer(**LLAMA))
    with jax.set_mesh(mesh_of(2, 2)):
        expected = run(nnx.merge(graph, state), x)
    y = jax.jit(
        jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh_of(2, 2),
            in_specs=(nnx.get_partition_spec(state), P("dp", "tp")),
            out_specs=P("dp", "tp"),
        )
    )(state, x)
    assert_trees_close(y, expected)


def test_layers_may_be_stacked_scanned_and_rematerialized():
    x = normal(0, X)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs):
        return TransformerLayer(16, 32, 4, rngs=rngs, **LLAMA)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(layer, x):
        return layer(x)

    def one_by_one(layers, x):
        graph, state = nnx.split(layers)
        for i in range(2):
            own = jax.tree.map(operator.itemgetter(i), state)
            x = nnx.merge(graph, own)(x)
        return x

    def gradients(function):
        def total(layers, x):
            return jnp.sum(jnp.sin(function(layers, x)))

        return nnx.jit(nnx.value_and_grad(total))

    with jax.set_mesh(mesh_of(2, 2)):
        layers = random_model(lambda: stack(nnx.Rngs(0)))
        found, expected = (gradients(f)(layers, x) for f in (scanned, one_by_one))
    assert_trees_close(found[0], expected[0], rtol=1e-4)
    assert_trees_close(*(nnx.to_pure_dict(part[1]) for part in (found, expected)))


def test_the_residual_stream_keeps_its_dtype():
    x = normal(0, X)
    with jax.set_mesh(mesh_of(1, 2)):
        narrow = layer(dtype=jnp.bfloat16)
        y, exact = run(narrow, x), run(layer(), x)
        assert run(narrow, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert y.dtype == jnp.float32
    assert_trees_close(y, exact, atol=0.05, rtol=0.05)


def test_calls_run_as_initialize_ub_configured_their_names():
    mesh = mesh_of(1, 4)
    ub.initialize_ub(
        (64, 16),
        4,
        dtype=jnp.float32,
        ub_cfgs={"proj_fprop": {"method": "pipeline", "num_splits": 2}},
        mesh=mesh,
    )
    graph, state = nnx.split(initialized(mesh=mesh))
    lowered = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(
        state, jnp.ones((2, 32, 16))
    )
    text = lowered.as_text()
    splits = [
        line.split("num_splits = ")[1][0]
        for line in text.splitlines()
        if "@jax_ub$matmul_reduce_scatter(" in line
    ]
    assert splits == ["2", "4"]  # proj, and fc2 by default


def test_layers_without_sequence_parallelism_run_after_initialize_ub():
    mesh, x = mesh_of(1, 4), normal(0, X)
    ub.initialize_ub((64, 16), 4, dtype=jnp.float32, mesh=mesh)
    model = initialized(mesh=mesh, sequence_parallel=False)
    gradients = nnx.jit(nnx.grad(loss))(model, x)
    assert_trees_close(by_name(gradients), by_name(of_flax(x.shape)[1][0]))


@pytest.mark.parametrize("sequence_parallel", [True, *nightly(False)])
def test_hidden_dropout_is_applied_to_the_results_of_attention_and_mlp(
    sequence_parallel,
):
    x = jnp.zeros(X)
    model = initialized(hidden_dropout=0.5, sequence_parallel=sequence_parallel)
    model.mlp.fc2.bias[...] += 1  # all other biases are zero, as is x
    model.mlp.fc2.kernel[...] *= 0
    tokens = "tp" if sequence_parallel else None
    graph, state = nnx.split(model)
    state_specs = nnx.get_partition_spec(state)

    @jax.jit
    def shard_map_operands(state, x):
        return jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh_of(1, 2),
            in_specs=(state_specs, P(None, tokens)),
            out_specs=P(None, tokens),
        )(state, x)

    with jax.set_mesh(mesh_of(1, 2)):
        for y in (run(model, x), shard_map_operands(state, x)):
            assert set(np.unique(y)) == {0, 2}
            halves = np.split(np.asarray(y), 2, axis=1)  # of the ranks
            assert (halves[0] != halves[1]).any()
        model.eval()
        assert_equal(run(model, x), jnp.ones(X))


def test_a_deterministic_view_disables_dropout_and_does_not_change_the_model():
    x, narrow = normal(0, X).astype(jnp.bfloat16), {"dtype": jnp.bfloat16}
    with jax.set_mesh(mesh_of(1, 2)):
        model = layer(hidden_dropout=0.5, attention_dropout=0.5, **narrow)
        view = nnx.view(model, deterministic=True)
        assert_equal(run(view, x), run(layer(**narrow), x))
        assert view.attention.deterministic
        assert not model.attention.deterministic
        assert nnx.view(view, deterministic=None).attention.deterministic


def test_flax_tabulates_a_layer_with_dropout():
    dropout = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    with jax.set_mesh(mesh_of(1, 2)):
        model = layer(activation="swiglu", **dropout)
        wide = {"width": 200}
        table = nnx.tabulate(model, jnp.ones(X), console_kwargs=wide)
    for path in ("attention/out", "mlp/fc2"):
        assert path in table


@pytest.mark.parametrize("shape", [(0, 8, 16), (2, 0, 16)])
def test_empty_inputs_have_empty_results(shape):
    with jax.set_mesh(mesh_of(1, 2)):
        mask = jnp.ones((shape[0], 1, shape[1], shape[1]), bool)
        assert run(layer(), jnp.ones(shape), mask=mask).shape == shape


@pytest.mark.parametrize("types", ["explicit", "auto"])
def test_empty_results_have_the_type_of_the_inputs(types):
    model = mlp()

    def scanned(x):
        return jax.lax.scan(lambda x, _: (model(x), None), x, length=2)[0]

    def inside(x):
        specs = {"in_specs": P("dp"), "out_specs": P("dp"), "axis_names": {"dp"}}
        return jax.shard_map(scanned, **specs)(x)

    for shape in ((0, 8, 16), (2, 0, 16)):
        with jax.set_mesh(mesh_of(2, 2, types)):
            x = jax.device_put(jnp.ones(shape), P("dp", "tp"))
            run = scanned if types == "explicit" else inside
            assert jax.eval_shape(run, x).shape == shape


def test_unknown_names_are_rejected():
    refused = functools.partial(pytest.raises, ub.errors.UnknownNameError)
    with refused(match=r"TransformerLayer: normalization = 'RMSnorm'.*mean 'RMSNorm'"):
        initialized(normalization="RMSnorm")
    with refused(match=r"LayerNormMLP: activation = 'swigly'.*mean 'swiglu'"):
        initialized(activation="swigly")
    with refused(match=r"'pipelin'.*mean 'pipeline'"):
        initialized(method="pipelin")


def test_inputs_of_other_features_are_rejected():
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(
            ub.errors.ShapeContractError,
            match=r"TransformerLayer: inputs have shape \(4, 8, 12\).*16 features",
        ),
    ):
        layer()(jnp.ones((4, 8, 12)))


def test_a_misspelt_argument_raises_a_type_error():
    with pytest.raises(TypeError, match="axisname"):
        initialized(axisname="tp")


class TestLayerNormMLP:
    """`LayerNormMLP`, the part of a layer after the attention."""

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("relu", jax.nn.relu),
            ("srelu", lambda x: jax.nn.relu(x) ** 2),
            ("silu", jax.nn.silu),
            ("qgelu", lambda x: x * jax.nn.sigmoid(1.702 * x)),
            (jnp.tanh, jnp.tanh),
        ],
    )
    def test_activations_are_found_by_name(self, name, function):
        self.check(name, lambda mlp, x: function(mlp.fc1(x)))

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("geglu", jax.nn.gelu),
            ("swiglu", jax.nn.silu),
            ("qgeglu", lambda x: x * jax.nn.sigmoid(1.702 * x)),
            pytest.param("reglu", jax.nn.relu, marks=pytest.mark.matrix),
            pytest.param(
                *("sreglu", lambda x: jax.nn.relu(x) ** 2), marks=pytest.mark.matrix
            ),
        ],
    )
    def test_gates_are_multiplied(self, name, function):
        self.check(name, lambda mlp, x: function(mlp.gate(x)) * mlp.fc1(x))

    def check(self, activation, hidden):
        x = normal(0, X)
        with jax.set_mesh(mesh_of(1, 2)):
            model = mlp(activation=activation)

            @nnx.jit
            def both(model, x):
                expected = model.fc2(hidden(model, model.norm(x)))
                return model(x), expected

            assert_trees_close(*both(model, x))

    def test_gate_and_fc1_share_a_gather(self):
        with jax.set_mesh(mesh_of(1, 2)):
            model = mlp(activation="swiglu")
            graph, state = nnx.split(model)
            program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
            text = compiled_text(program, state, normal(0, X))
        assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}


class TestLayerNormLinear:
    """A norm and one linear layer."""

    @pytest.mark.parametrize("parallel", ["column", None])
    def test_it_is_the_norm_then_the_layer(self, parallel):
        x, rngs = normal(0, X), nnx.Rngs(0)
        norm, linear = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        with jax.set_mesh(mesh_of(2, 2)):
            model = LayerNormLinear(
                16,
                32,
                parallel=parallel,
                return_layernorm_output=True,
                rngs=nnx.Rngs(0),
            )
            y, normalized = run(model, x)
            model.return_layernorm_output = False
            assert_trees_close(run(model, x), y)
        assert_trees_close(normalized, norm(x))
        assert_trees_close(y, linear(norm(x)))

    def test_a_row_layer_is_refused(self):
        with pytest.raises(
            ub.errors.UnsupportedOverlapError, match=r'"row" shards.*parallel="column"'
        ):
            LayerNormLinear(16, 32, parallel="row", rngs=nnx.Rngs(0))
