"""FSDP: shardings, collectives, values, checkpoints."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import (
    TYPES,
    Block,
    assert_learns_as,
    assert_trees_close,
    loss,
    loss_and_gradients,
    plain_block,
    random_model,
    random_variables,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub.errors import ShapeContractError, UnknownNameError
from jax_ub.flax import Linear, MainGrad, TransformerLayer, linen, with_main_grads

AXES = ("dp", "fsdp", "tp")
X = P(("dp", "fsdp"), "tp")
COLUMN, ROW = P("fsdp", "tp"), P("tp", "fsdp")
INIT = nnx.initializers.lecun_normal()
RULES = (("embed", "fsdp"), ("mlp", "tp"))


def mesh_of(types="auto", shape=(2, 2, 2)) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(TYPES[types],) * 3)


def block(make=Linear, up=None, down=None, **options):
    """A block whose kernels may have partitioning metadata of Flax."""

    def layer(sizes, parallel, spec):
        given = {"parallel": parallel} if make is Linear else {}
        if spec is not None:
            names = {"out_sharding": tuple(spec), "sharding_rules": RULES}
            given["kernel_metadata"] = names
        return lambda rngs: make(*sizes, rngs=rngs, **given, **options)

    up, down = layer((16, 32), "column", up), layer((32, 16), "row", down)
    return random_model(lambda: Block(up, down, nnx.Rngs(0)))


def with_dot_general():
    """Layers of Flax, whose sharding only an explicit mesh has."""
    model = block(nnx.Linear, COLUMN, ROW)
    model.up.dot_general = ub.dot_general("column", fsdp_axes="fsdp")
    model.down.dot_general = ub.dot_general("row", fsdp_axes=("fsdp",))
    return model


def by_path():
    """Returns a model that is created on the mesh."""
    model = plain_block()
    for layer, spec in ((model.up, COLUMN), (model.down, ROW)):
        layer.kernel.set_value(jax.device_put(layer.kernel[...], spec))
    return ub.overlap(model, {"up": "column", "down": "row"})


MODELS = {
    "option": lambda: block(fsdp_axes="fsdp"),
    "logical axes": lambda: block(up=("embed", "mlp"), down=("mlp", "embed")),
    "overlap": lambda: ub.overlap(block(nnx.Linear, COLUMN, ROW)),
    "overlap by path": by_path,
    "dot_general": with_dot_general,
}


def specs_of(tree):
    return jax.tree.map(lambda array: array.sharding.spec, nnx.to_pure_dict(tree))


def test_no_axes_may_be_given_as_none():
    assert ub.dot_general("column", fsdp_axes=None) == ub.dot_general("column")


@covering(name=MODELS, types=["auto", "explicit"])
def test_a_training_step_keeps_all_shardings(name, types):
    x, optimizer = normal(0, (8, 8, 16)), optax.adam(0.1)
    noted = len(ub.fallbacks())
    with jax.set_mesh(mesh_of(types)):
        graph, params = nnx.split(MODELS[name]())
        state = jax.jit(optimizer.init)(params)
        layouts = specs_of(params)
        assert (layouts["up"]["kernel"], layouts["down"]["kernel"]) == (COLUMN, ROW)

        def step(params, state, x):
            gradients = jax.grad(lambda p: loss(nnx.merge(graph, p), x))(params)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state, gradients

        x = jax.device_put(x, X)
        program = jax.jit(step, donate_argnums=(0, 1))
        text = compiled_text(program, params, state, x)
        params, state, gradients = program(params, state, x)

    for tree in (params, gradients, state[0].mu, state[0].nu):
        found = specs_of(tree)
        assert (found["up"]["kernel"], found["down"]["kernel"]) == (COLUMN, ROW)
    assert len(ub.fallbacks()) == noted
    assert calls(text)["all_gather_matmul"] == 2
    assert calls(text)["matmul_reduce_scatter"] == 1
    # XLA all-gathers each kernel over data axes, and the second one again in the
    # backward pass unless it keeps it. Gradients are reduce-scattered.
    kernels = re.findall(r"= f32\[([\d,]+,[\d,]+)\]\S* all-gather\(", text)
    assert kernels in (["16,16"] * 2, ["16,16"] * 3)
    assert collectives(text)["reduce-scatter"] == 2
    assert not re.search(r"= .*f32\[16,16\].* all-reduce\(", text)

    plain = plain_block()
    expected = loss_and_gradients(plain, normal(0, (8, 8, 16)))[1]
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))


@covering(axes=[("tp", "fsdp"), ("fsdp", "tp")], types=["auto", "explicit"])
def test_both_axes_may_shard_one_dimension(axes, types):
    x, up, down = normal(0, (8, 8, 16)), P(None, axes), P(axes, None)
    with jax.set_mesh(mesh_of(types)):
        model = block(nnx.Linear, up, down)
        assert ub.overlapped(ub.overlap(model)) == {"up": "column", "down": "row"}
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert_learns_as(plain_block(), x, found)


@pytest.mark.parametrize(
    ("types", "shape", "options"),
    [
        ("auto", (64, 16), {}),
        pytest.param(
            *("explicit", (8, 8, 16), {"data_axes": ("fsdp", "dp")}),
            marks=pytest.mark.matrix,
        ),
        ("auto", (8, 8, 16), {"sequence_parallel": False}),
        # Ranks of "fsdp" have the same examples: XLA gathers the kernels.
        ("auto", (8, 8, 16), {"data_axes": ("dp",)}),
        ("explicit", (3, 8, 16), {}),
    ],
)
def test_any_sharding_of_the_examples_gives_the_same(types, shape, options):
    x = normal(0, shape)
    with jax.set_mesh(mesh_of(types)):
        model = block(fsdp_axes=("dp", "fsdp"), **options)
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert_learns_as(plain_block(), x, found)


@pytest.mark.parametrize("types", ["auto", *nightly("explicit")])
def test_a_transformer_layer_takes_the_axes_for_all_its_kernels(types):
    sizes, options = (16, 32, 4), {"activation": "swiglu", "num_gqa_groups": 2}
    x = normal(0, (8, 8, 16))

    def create(**more):
        made = {"rngs": nnx.Rngs(0), **options, **more}
        return TransformerLayer(*sizes, **made)

    plain = random_model(create)
    with jax.set_mesh(mesh_of(shape=(1, 1, 1))):
        expected = nnx.jit(nnx.value_and_grad(loss))(plain, x)
    with jax.set_mesh(mesh_of(types)):
        model = random_model(lambda: create(fsdp_axes="fsdp"))
        assert model.attention.query.kernel.sharding.spec == P("fsdp", "tp", None)
        assert model.attention.out.kernel.sharding.spec == P("tp", None, "fsdp")
        assert model.mlp.fc2.bias.sharding.spec == P(None)
        graph, state = nnx.split(model)
        program = jax.jit(
            jax.value_and_grad(lambda state, x: loss(nnx.merge(graph, state), x))
        )
        text = compiled_text(program, state, jax.device_put(x, X))
        value, gradients = program(state, x)
    assert collectives(text)["reduce-scatter"] == 7
    assert_trees_close(value, expected[0], rtol=1e-4)
    expected = nnx.to_pure_dict(expected[1])
    assert_trees_close(nnx.to_pure_dict(gradients), expected, rtol=1e-4)


class LinenBlock(nn.Module):
    ours: bool

    @nn.compact
    def __call__(self, x):
        def make(features, kind, names, name):
            options = {"kernel_init": nn.with_logical_partitioning(INIT, names)}
            if self.ours:
                options |= {"parallel": kind, "fsdp_axes": "fsdp"}
                return linen.Linear(features, name=name, **options)
            dot_general = ub.dot_general(kind, fsdp_axes="fsdp")
            return nn.Dense(features, dot_general=dot_general, name=name, **options)

        up = make(32, "column", ("embed", "mlp"), "up")
        return x + make(16, "row", ("mlp", "embed"), "down")(nn.gelu(up(x)))


@covering(ours=[True, False], types=["auto", "explicit"])
def test_linen_models_are_created_sharded_by_their_rules(ours, types):
    x, model = normal(0, (8, 8, 16)), LinenBlock(ours)
    mesh = mesh_of(types)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, X)
        specs = nn.get_partition_spec(jax.eval_shape(model.init, jax.random.key(0), x))
        layouts = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        init = jax.jit(model.init, out_shardings=layouts)
        variables = nn.unbox(init(jax.random.key(0), x))

        program = jax.jit(jax.grad(lambda v, x: loss(lambda x: model.apply(v, x), x)))
        text = compiled_text(program, variables, x)
        gradients = program(variables, x)["params"]
    assert gradients["up"]["kernel"].sharding.spec == COLUMN
    assert gradients["down"]["kernel"].sharding.spec == ROW
    assert collectives(text)["reduce-scatter"] == 2
    plain = plain_block()
    nnx.update(plain, jax.tree.map(np.asarray, variables["params"]))
    expected = nnx.to_pure_dict(loss_and_gradients(plain, np.asarray(x))[1])
    assert_trees_close(gradients, expected)


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
@pytest.mark.parametrize("main_grad", [True, *nightly(False)])
def test_a_scan_over_layers_keeps_no_gathered_kernels(types, main_grad):
    x = normal(0, (8, 8, 16))
    with jax.set_mesh(mesh_of(types)):
        graph, state = nnx.split(block(fsdp_axes="fsdp", main_grad=main_grad))

        def stack(array):
            layout = P(None, *array.sharding.spec)
            return jax.device_put(np.stack([np.asarray(array)] * 5), layout)

        def value(state, x):
            def run(x, state):
                return nnx.merge(graph, state)(x), None

            return loss(lambda x: jax.lax.scan(run, x, state)[0], x)

        states = jax.tree.map(stack, state)
        program = jax.jit(jax.grad(value))
        text = compiled_text(program, states, jax.device_put(x, X))
    assert "f32[5,16,8]" in text  # their shards
    assert "f32[5,16,16]" not in text
    assert collectives(text)["all-gather"] == 4  # each kernel forward and backward


@covering(
    types=["explicit", *nightly("auto")], axes=[("dp", "fsdp"), *nightly(("fsdp",))]
)
def test_microbatches_accumulate_into_the_shards(axes, types):
    xs = normal(0, (3, 8, 8, 16))
    with jax.set_mesh(mesh_of(types)):
        model = block(fsdp_axes=axes, main_grad=True)
        graph, params, main_grads = nnx.split(model, nnx.Param, MainGrad)

        def step(params, main_grads, xs):
            def add(carry, x):
                sums, main_grads = carry
                of = lambda *state: loss(nnx.merge(graph, *state), x)  # noqa: E731
                found, main_grads = jax.grad(of, argnums=(0, 1))(params, main_grads)
                return (jax.tree.map(jnp.add, sums, found), main_grads), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            (sums, main_grads), _ = jax.lax.scan(add, (zeros, main_grads), xs)
            return with_main_grads(sums, main_grads)

        xs = jax.device_put(xs, P(None, *X))
        program = jax.jit(step, donate_argnums=1)
        text = compiled_text(program, params, main_grads, xs)
        layouts = specs_of(params)
        gradients = program(params, main_grads, xs)
    kernels = [specs_of(gradients)[name]["kernel"] for name in ("up", "down")]
    assert kernels == [layouts[name]["kernel"] for name in ("up", "down")]
    # The backward pass gathers the second kernel again. Accumulators are not gathered.
    assert collectives(text)["all-gather"] == 3
    assert collectives(text)["reduce-scatter"] == 2
    expected = loss_and_gradients(plain_block(), np.asarray(xs).reshape(-1, 8, 16))[1]
    expected = nnx.to_pure_dict(expected)
    assert_trees_close(nnx.to_pure_dict(gradients), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, *nightly(False)])
def test_inside_shard_map_kernels_are_gathered_over_fsdp_axes(check_vma):
    x = normal(0, (8, 8, 16))
    with jax.set_mesh(mesh_of()):
        graph, state = nnx.split(block(fsdp_axes="fsdp"))
        specs = nnx.get_partition_spec(state)

        def differentiate(specs):
            apply = jax.shard_map(
                lambda state, x: nnx.merge(graph, state)(x),
                in_specs=(specs, X),
                out_specs=X,
                check_vma=check_vma,
            )
            return jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(apply(*given)))))

        gradients = differentiate(specs)(state, x)
        of_ranks = {P("fsdp", "tp"): P(None, "tp"), P("tp", "fsdp"): P("tp")}
        whole = jax.tree.map(lambda spec: of_ranks.get(spec, spec), specs)
        of_whole = differentiate(whole)(state, x)
    expected = nnx.to_pure_dict(loss_and_gradients(plain_block(), x)[1])
    assert_trees_close(nnx.to_pure_dict(gradients), expected)
    assert_trees_close(nnx.to_pure_dict(of_whole), expected)


def test_inside_shard_map_a_scan_keeps_no_gathered_kernels():
    x = jnp.zeros((8, 8, 16))
    with jax.set_mesh(mesh_of()):
        graph, state = nnx.split(block(fsdp_axes="fsdp"))
        specs = nnx.get_partition_spec(state)

        def layers(states, x):
            run = lambda x, state: (nnx.merge(graph, state)(x), None)  # noqa: E731
            return jax.lax.scan(run, x, states)[0]

        states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), state)
        in_specs = jax.tree.map(lambda spec: P(None, *spec), specs), X
        apply = jax.shard_map(layers, in_specs=in_specs, out_specs=X)
        gradient = jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(apply(*given)))))
        text = compiled_text(gradient, states, x)
    assert "f32[5,16,8]" in text
    assert "f32[5,16,16]" not in text


@pytest.mark.parametrize("parallel", ["column", "row", None])
def test_inside_shard_map_linen_takes_shards(parallel):
    x, dense = normal(0, (8, 8, 16)), nn.Dense(32)
    variables = random_variables(dense, x)
    ours = linen.Linear(32, parallel=parallel, fsdp_axes="fsdp")
    kernel = {"column": COLUMN, "row": ROW, None: P("fsdp")}[parallel]
    specs = {"params": {"kernel": kernel, "bias": ours.sharding_layout.bias_spec}}
    tokens, features = X, P(("dp", "fsdp"), None, "tp")
    apply = jax.shard_map(
        ours.apply,
        mesh=mesh_of(),
        in_specs=(specs, features if parallel == "row" else tokens),
        out_specs=features if parallel == "column" else tokens,
    )
    assert_trees_close(jax.jit(apply)(variables, x), dense.apply(variables, x))


def test_checkpoints_load_on_another_mesh(tmp_path):
    x = normal(0, (8, 8, 16))
    with jax.set_mesh(mesh_of(shape=(2, 2, 2))):
        state = nnx.state(block(fsdp_axes="fsdp"))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "step", state)
    with jax.set_mesh(mesh_of(shape=(1, 4, 2))):
        model = nnx.eval_shape(lambda: block(fsdp_axes="fsdp"))
        like = nnx.state(block(fsdp_axes="fsdp"))
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "step", like)
        nnx.update(model, restored)
        assert model.up.kernel.sharding.shard_shape((16, 32)) == (4, 16)
        y = nnx.jit(lambda model, x: model(x))(model, x)
    assert_trees_close(y, plain_block()(x))
    assert_equal(nnx.to_pure_dict(restored), nnx.to_pure_dict(state))


def layer(*sizes, parallel="column", **options):
    return Linear(*sizes or (16, 32), parallel=parallel, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: layer(15, 32, fsdp_axes="fsdp"),
            ShapeContractError,
            "linear(parallel='column'): the kernel has 15 in features, which do not "
            "divide into the 2 ranks of fsdp_axes = ('fsdp',). Use 16, or fsdp_axes=()",
        ),
        (
            lambda: layer(32, 18, parallel="row", fsdp_axes=("dp", "fsdp")),
            ShapeContractError,
            "the kernel has 18 out features, which do not divide into the 4 ranks of",
        ),
        (
            lambda: layer(fsdp_axes="fsdpp"),
            UnknownNameError,
            "fsdp_axes has 'fsdpp', which is not an axis of the mesh {'dp': 2, 'fsdp': "
            "2, 'tp': 2}. Did you mean 'fsdp'?",
        ),
        (
            lambda: layer(fsdp_axes=("fsdp", "tp")),
            ShapeContractError,
            "fsdp_axes = ('fsdp', 'tp') has axis_name = 'tp', whose ranks share the "
            "tokens and features of the same examples. Pass fsdp_axes=('fsdp',), or",
        ),
        (
            lambda: ub.dot_general("row", fsdp_axes=3),
            ShapeContractError,
            "fsdp_axes = 3 are not names of mesh axes. Pass a tuple of them, for "
            'example fsdp_axes=("fsdp",).',
        ),
        (
            lambda: TransformerLayer(
                16,
                32,
                4,
                kernel_init=nnx.with_partitioning(INIT, ("fsdp", "tp")),
                rngs=nnx.Rngs(0),
            ),
            ShapeContractError,
            "'row' needs its in dimension over 'tp'. Shard it P('tp', 'fsdp'), as "
            "fsdp_axes=('fsdp',) does, or use 'column'.",
        ),
        (
            lambda: layer(kernel_metadata={"out_sharding": (("fsdp", "tp"), None)}),
            ShapeContractError,
            "the kernel is sharded P(('fsdp', 'tp'), None), along its in dimension, "
            "but 'column' needs its out dimension over 'tp'. Shard it P('fsdp', 'tp')",
        ),
    ],
)
def test_invalid_axes_are_rejected(make, error, text):
    with jax.set_mesh(mesh_of()), pytest.raises(error, match=re.escape(text)):
        make()
