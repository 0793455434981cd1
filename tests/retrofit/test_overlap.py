import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import linen, nnx
from flax_models import (
    Block,
    assert_learns_as,
    assert_trees_close,
    loss,
    loss_and_gradients,
    mesh_of,
    plain_block,
    random_layer,
    random_model,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, collectives, compiled_text

import jax_ub as ub


def sharded(*names):
    return {"out_sharding": names}


def sharded_block(rngs=None) -> Block:
    """A block of layers of Flax, sharded by metadata of Flax."""
    up = {"kernel_metadata": sharded(None, "tp"), "bias_metadata": sharded("tp")}
    down = {"kernel_metadata": sharded("tp", None)}
    if rngs is None:
        return random_model(lambda: sharded_block(nnx.Rngs(0)))
    return Block(
        lambda rngs: nnx.Linear(16, 32, rngs=rngs, **up),
        lambda rngs: nnx.Linear(32, 16, rngs=rngs, **down),
        rngs,
    )


class Model(nnx.Module):
    """Attention, a list of blocks, and a layer that is not sharded."""

    def __init__(self, make, attention):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, **attention)
        self.blocks = nnx.List([make(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x, decode=False)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_model():
    return random_model(lambda: Model(plain_block, {}))


def sharded_model():
    attention = {
        "kernel_metadata": sharded(None, "tp", None),
        "out_kernel_metadata": sharded("tp", None, None),
    }
    return random_model(lambda: Model(sharded_block, attention))


KINDS = {
    "attention.query": "column",
    "attention.key": "column",
    "attention.value": "column",
    "attention.out": "row",
    "blocks.0.up": "column",
    "blocks.0.down": "row",
    "blocks.1.up": "column",
    "blocks.1.down": "row",
}


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_rules_auto_overlap_all_sharded_layers(types):
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = ub.overlap(sharded_model())
        assert ub.overlapped(model) == KINDS
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert_learns_as(plain_model(), x, found, rtol=1e-4, atol=1e-4)


def test_a_model_with_sharded_parameters_needs_no_mesh():
    mesh, x = mesh_of(1, 2), normal(0, (4, 8, 16))
    model = plain_block()
    for layer, spec in ((model.up, P(None, "tp")), (model.down, P("tp"))):
        kernel = jax.device_put(layer.kernel[...], NamedSharding(mesh, spec))
        layer.kernel.set_value(kernel)
    model = ub.overlap(model)
    graph, state = nnx.split(model)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "tp")))
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    text = compiled_text(program, state, x)
    assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    assert not collectives(text)
    assert_trees_close(program(state, x), plain_block()(x))


def test_rules_select_by_path_and_the_first_match_counts():
    model = plain_model()
    parameters = jax.tree.leaves(nnx.state(model))
    rules = {r"blocks\.0\..*": None, r".*\.up": "column", r".*\.down": "rs"}
    assert ub.overlap(model, rules) is model
    assert ub.overlapped(model) == {"blocks.1.up": "column", "blocks.1.down": "row"}
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(parameters, after, strict=True))
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        y = nnx.jit(lambda model, x: model(x))(model, x)
    assert_trees_close(y, plain_model()(x))


@covering(dim=[0, 1], has_metadata=[False, True])
def test_stacked_layers_are_found_and_scanned(dim, has_metadata):
    name = {"transform_metadata": {nnx.PARTITION_NAME: None}} if has_metadata else {}
    axes = nnx.StateAxes({nnx.Param: dim})

    def stack(make):
        create = nnx.vmap(lambda key: make(nnx.Rngs(key)), out_axes=axes, **name)
        return create(jax.random.split(jax.random.key(0), 2))

    def run(model, x):
        scan = nnx.scan(in_axes=(axes, nnx.Carry), out_axes=nnx.Carry, **name)
        return scan(lambda layer, x: layer(x))(model, x)

    x = normal(0, (4, 8, 16))
    expected = nnx.jit(run)(stack(plain_block), x)
    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(stack(sharded_block))
        assert ub.overlapped(model) == {"up": "column", "down": "row"}
        text = compiled_text(nnx.jit(run), model, x)
        y = nnx.jit(run)(model, x)
    assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    assert_trees_close(y, expected)


def test_a_method_may_be_named_for_the_whole_model():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(sharded_block(), method="xla")
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        assert not calls(compiled_text(program, state, x))
        ub.overlap(model, sequence_parallel=False)
        assert ub.overlapped(model) == {"up": "column", "down": "row"}
        graph = nnx.graphdef(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        assert calls(compiled_text(program, state, x))["matmul_all_reduce"] == 1


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        (
            {r"blocks.0.upp": "column"},
            ub.errors.UnknownNameError,
            "overlap: the rule 'blocks.0.upp' matches no linear layer of the model; a "
            "rule must match a whole path. Did you mean 'blocks.0.up'?",
        ),
        (
            {r".*up": "columns"},
            ub.errors.UnknownNameError,
            "overlap: rules['.*up'] = 'columns' is not a way to shard a kernel. Did "
            "you mean 'column'?",
        ),
        (
            "auto",
            ub.errors.ShapeContractError,
            "overlap: none of the model's 9 linear layers has a kernel sharded over "
            "'tp', so rules=\"auto\" selects no layer. Shard the kernels "
            "first, or pass rules={'attention.key': \"column\", ...}.",
        ),
        (
            "Auto",
            ub.errors.UnknownNameError,
            "overlap: rules = 'Auto' is neither \"auto\" nor a dictionary",
        ),
        (
            ["up"],
            ub.errors.UnknownNameError,
            "overlap: rules = ['up'] is neither \"auto\" nor a dictionary. Pass, for "
            'example, {r".*\\.up": "column"}',
        ),
        (
            {"up(": "column"},
            ub.errors.UnknownNameError,
            "overlap: the rule 'up(' is not a regular expression: missing )",
        ),
    ],
)
def test_rules_that_match_nothing_are_rejected(rules, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ub.overlap(plain_model(), rules)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: linen.Dense(8), "Dense"),
        (lambda: lambda x: x, "function"),
        (lambda: nnx.LayerNorm(8, rngs=nnx.Rngs(0)), "LayerNorm"),
    ],
)
def test_a_model_without_linear_layers_is_rejected(make, kind):
    text = rf"of type {kind}, has no nnx.Linear.*Layers of linen take dot_general="
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        ub.overlap(make(), {".*": "column"})


def test_a_rule_that_contradicts_the_kernels_sharding_is_rejected_and_changes_nothing():
    with jax.set_mesh(mesh_of(1, 2)):
        model = sharded_block()
        text = (
            "linear(parallel='row') (layer 'up'): the kernel is sharded P(None, "
            "'tp'), along its out dimension, but 'row' needs its in dimension"
        )
        with pytest.raises(ub.errors.ShapeContractError, match=re.escape(text)):
            ub.overlap(model, {"down": "row", "up": "row"})
        assert ub.overlapped(model) == {}


def test_a_layer_keeps_a_custom_dot_general():
    def rounded(lhs, rhs, dimension_numbers, **options):
        return jax.lax.dot_general(jnp.round(lhs), rhs, dimension_numbers, **options)

    with jax.set_mesh(mesh_of(1, 2)):
        model = sharded_block()
        model.up.dot_general = rounded
        assert ub.overlapped(ub.overlap(model)) == {"down": "row"}
    assert model.up.dot_general is rounded
    note = ub.fallbacks()[-1]
    assert note.label == "overlap('up')"
    assert "the layer has a custom dot_general, <function" in note.reason
    text = r"'up' has a custom dot_general, <function.*lax.dot_general first, or "
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=text):
        ub.overlap(model, {"down": "row", "up": "column"})
    before = len(ub.fallbacks())
    ub.overlap(model, {"up": None, ".*": "row"})
    assert ub.overlapped(model) == {"down": "row"}
    assert ub.fallbacks()[before:] == (note,)


def test_a_layer_that_an_earlier_call_has_overlapped_is_no_fallback():
    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(sharded_block(), {"up": "column", "down": None})
        before = len(ub.fallbacks())
        ub.overlap(model, {"down": "row"})
    assert ub.overlapped(model) == {"up": "column", "down": "row"}
    assert len(ub.fallbacks()) == before


class Mixed(nnx.Module):
    """One layer of each kind that `overlap` supports."""

    def __init__(self, dot_general=jax.lax.dot_general):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(16, 32, dot_general=dot_general, rngs=rngs)
        self.down = nnx.LinearGeneral((32,), 16, rngs=rngs)
        self.mix = nnx.Einsum("BTK,KN->BTN", (16, 16), rngs=rngs)
        self.head = nnx.Embed(8, 16, rngs=rngs)

    def __call__(self, x):
        return self.head.attend(self.mix(self.down(self.up(x))))


@pytest.mark.parametrize("fp8", [None, ub.fp8.DelayedScaling()])
def test_a_second_call_ends_the_overlap_of_layers_that_it_maps_to_none(fp8):
    kinds = {"up|head.attend": "column", "down|mix": "row"}
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        plain = random_model(Mixed)
        model = ub.overlap(random_model(Mixed), kinds, fp8=fp8)
        assert ub.overlap(model, {"up|mix": None, "down": "row"}) is model
        assert ub.overlapped(model) == {"down": "row", "head.attend": "column"}
        ub.overlap(model, {".*": None})
        assert not ub.overlapped(model)
        for name in ("up", "down", "mix", "head"):
            restored, made = getattr(model, name), getattr(plain, name)
            assert type(restored) is type(made)
            assert vars(restored).keys() == vars(made).keys()
        assert model.up.dot_general is model.down.dot_general is jax.lax.dot_general
        assert model.mix.einsum_op is jnp.einsum
        assert_trees_close(nnx.jit(lambda model, x: model(x))(model, x), plain(x))
        assert ub.overlapped(ub.overlap(model, kinds)).keys() == {
            *("up", "down", "mix", "head.attend")
        }


def test_a_failed_second_call_changes_no_layer():
    model = ub.overlap(random_model(Mixed), {"up": "column"})
    with pytest.raises(ub.errors.UnknownNameError, match="matches no overlapped layer"):
        ub.overlap(model, {"up": None, "down": "row"}, ub_names={"up": "fc1"})
    assert ub.overlapped(model) == {"up": "column"}


def test_a_layer_made_with_dot_general_may_be_mapped_to_none():
    model = Mixed(dot_general=ub.dot_general("column"))
    assert ub.overlapped(model) == {"up": "column"}
    ub.overlap(model, {"up": None})
    assert model.up.dot_general is jax.lax.dot_general


def test_sizes_of_a_layer_may_be_numpy_integers():
    block = Block(
        lambda rngs: nnx.Linear(np.int64(16), np.int64(32), rngs=rngs),
        lambda rngs: nnx.LinearGeneral((np.int64(8), 4), 16, axis=(-2, -1), rngs=rngs),
        nnx.Rngs(0),
    )
    model = ub.overlap(block, {"up": "column", "down": "row"})
    assert ub.overlapped(model) == {"up": "column", "down": "row"}


def test_an_error_in_a_layer_names_its_path():
    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(sharded_block(), method="direct")
        with pytest.raises(ValueError, match=r"layer 'up'.*7 tokens"):
            model(jnp.ones((2, 7, 16)))


@pytest.mark.parametrize("types", ["auto", *nightly("explicit")])
def test_a_model_takes_one_token_on_any_mesh(types):
    x = normal(0, (4, 1, 16))
    with jax.set_mesh(mesh_of(2, 2, types)):
        model, token = ub.overlap(sharded_block()), jax.device_put(x, P("dp"))
        found = nnx.jit(nnx.value_and_grad(loss))(model, token)
    assert "has 1 tokens" in ub.fallbacks()[-1].reason
    assert_learns_as(plain_block(), x, found, rtol=1e-4, atol=1e-4)


def test_attention_decodes_one_token_at_a_time():
    x = normal(0, (2, 3, 16))
    flax, ours = (
        nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0)) for _ in range(2)
    )
    rules = {"query|key|value": "column", "out": "row"}
    ours = ub.overlap(ours, rules, sequence_parallel=False)
    for model in (flax, ours):
        model.init_cache(x.shape)
    with jax.set_mesh(mesh_of(1, 4)):
        step = nnx.jit(lambda model, token: model(token))
        for i in range(x.shape[1]):
            token = x[:, i : i + 1]
            assert_trees_close(step(ours, token), step(flax, token))


@covering(
    types=["explicit", *nightly("auto")],
    layout=[
        (8, 2, {"query": None, "key|value": "column", "out": "row"}),
        *nightly((6, 6, {"query|key|value": "column", "out": "row"})),
    ],
)
def test_attention_whose_heads_do_not_divide_falls_back_to_jax(types, layout):
    heads, kv_heads, rules = layout
    x = normal(0, (2, 8, 24))
    options = {"num_kv_heads": kv_heads, "decode": False}
    flax, ours = (
        random_layer(nnx.MultiHeadAttention, heads, 24, **options) for _ in range(2)
    )
    ub.overlap(ours, rules)
    expected = loss_and_gradients(flax, x)
    with jax.set_mesh(mesh_of(1, 4, types)):
        tokens = jax.device_put(x, P(None, "tp"))
        ub.fallbacks(clear=True)
        found = loss_and_gradients(ours, tokens)
    fallbacks = {note.label: note.reason for note in ub.fallbacks()}
    (reason,) = {reason for label, reason in fallbacks.items() if "key" in label}
    assert f"{kv_heads} out features, which do not divide into the 4 ranks" in reason
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)


class Heads(nnx.Module):
    """Attention's products as einsums: queries, stacked keys and values, and out."""

    def __init__(self, out_shardings=(None, None, None)):
        rngs = nnx.Rngs(0)
        make = [
            ("BTD,NDH->BTNH", (4, 16, 8), (4, 8)),
            ("BTD, SDKH -> SBTKH", (3, 16, 4, 8), None),
            ("...NH,NHD->...D", (4, 8, 16), (16,)),
        ]
        self.query, self.stacked, self.out = (
            nnx.Einsum(*args, rngs=rngs, kernel_metadata=sharded(*each) if each else {})
            for args, each in zip(make, out_shardings, strict=True)
        )

    def __call__(self, x):
        key, value, gate = self.stacked(x)
        return x + self.out(jnp.sin(self.query(x)) * key + value * gate)


HEADS = {"query": "column", "stacked": "column", "out": "row"}
# Heads are neither the first dimension of the stacked kernels nor contracted.
HEADS_SPECS = [("tp", None, None), (None, None, "tp", None), ("tp", None, None)]


@pytest.mark.parametrize("types", ["auto", *nightly("explicit")])
def test_einsums_that_are_dense_layers_are_overlapped(types):
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = ub.overlap(random_model(lambda: Heads(HEADS_SPECS)))
        assert ub.overlapped(model) == HEADS
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = compiled_text(program, state, x)
    assert calls(text) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1}
    assert_learns_as(random_model(Heads), x, found, rtol=1e-4, atol=1e-4)


def test_rules_do_not_shard_the_labels_that_stack_results():
    x = normal(0, (4, 8, 16))
    model = ub.overlap(random_model(Heads), HEADS)
    with jax.set_mesh(mesh_of(1, 4)):
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = compiled_text(program, state, x)
        y = program(state, x)
    assert calls(text) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1}
    # The 4 heads are sharded, not the stacked 3, as for keys, values and gates.
    assert not collectives(text)
    assert_trees_close(y, random_model(Heads)(x))


def test_einsums_that_are_not_dense_layers_are_not_replaced():
    def rounded(subscripts, x, kernel, **options):
        return jnp.einsum(subscripts, jnp.round(x), kernel, **options)

    class Experts(nnx.Module):
        def __init__(self):
            options = {"rngs": nnx.Rngs(0), "kernel_metadata": sharded("tp", None)}
            self.batched = nnx.Einsum("TEK,EK->TE", (4, 16), None, **options)
            self.repeated = nnx.Einsum("TK,KKN->TN", (16, 16, 4), None, **options)
            self.mapped = nnx.Einsum("TK,...KN->...TN", (4, 16, 4), None, **options)
            self.rounded = nnx.Einsum("TK,KN->TN", (16, 4), None, **options)
            self.rounded.einsum_op = rounded
            self.row = nnx.Einsum("TK,KN->TN", (16, 4), None, **options)

    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(Experts())
    assert ub.overlapped(model) == {"row": "row"}
    notes = {note.label: note.reason for note in ub.fallbacks()[-4:]}
    equation = "the layer has einsum_str = {}, which is not a dense layer"
    assert notes["overlap('batched')"] == equation.format("'TEK,EK->TE'")
    assert notes["overlap('repeated')"] == equation.format("'TK,KKN->TN'")
    assert notes["overlap('mapped')"] == equation.format("'TK,...KN->...TN'")
    assert "a custom einsum_op, <function" in notes["overlap('rounded')"]
    for path, text in (
        ("batched", "'TEK,EK->TE', which is not a dense layer. Write one with each"),
        ("rounded", "Set it to jax.numpy.einsum first, or exclude the layer"),
    ):
        with pytest.raises(ub.errors.UnsupportedOverlapError, match=re.escape(text)):
            ub.overlap(model, {path: "column"})


def test_an_equation_passed_to_a_call_must_be_a_dense_layer():
    with jax.set_mesh(mesh_of(1, 2)):
        layer = nnx.Einsum("TK,KN->TN", (4, 4), None, rngs=nnx.Rngs(0))
        model = ub.overlap(nnx.List([layer]), {"0": "column"})
        x = normal(0, (4, 4))
        assert_trees_close(model[0](x, "TK,NK->TN"), x @ layer.kernel[...].T)
        y = model[0](x, "TK,TK->T")
        assert_trees_close(y, jnp.sum(x * layer.kernel[...], axis=1))
        assert ub.fallbacks()[-1].reason == "'TK,TK->T' is not a dense layer"
        ub.overlap(model, {"0": "column"}, method="direct")
        text = "'TK,TK->T' is not a dense layer. Call the layer with each label in two"
        with pytest.raises(ub.errors.UnsupportedOverlapError, match=re.escape(text)):
            model[0](x, "TK,TK->T")


def test_an_einsum_that_falls_back_obeys_out_sharding():
    x = normal(0, (4, 7, 16))
    with jax.set_mesh(mesh_of(2, 2, "explicit")):
        model = ub.overlap(random_model(lambda: Heads(HEADS_SPECS)))
        expected = random_model(Heads).stacked(x)
        for spec in (P(None, None, None, "tp"), P(None, "dp")):
            y = model.stacked(x, out_sharding=spec)
            assert y.sharding.spec == P(*spec, *[None] * (5 - len(spec)))
            assert_trees_close(y, expected)
    assert "has 7 tokens" in ub.fallbacks()[-1].reason


def test_an_einsum_with_other_dimensions_than_its_labels_is_rejected():
    model = ub.overlap(random_model(Heads), HEADS)
    text = "x (8, 16) and kernel (4, 16, 8) do not have the dimensions of"
    with pytest.raises(ub.errors.ShapeContractError, match=re.escape(text)):
        model.query(jnp.ones((8, 16)))
