import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import (
    assert_trees_close,
    loss,
    loss_and_gradients,
    mesh_of,
    random_layer,
)
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub._src.flax.core_attention import CoreAttention, rotate
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub.errors import UnknownNameError
from jax_ub.flax import MainGrad, MultiHeadAttention

X = (4, 8, 16)


def create_flax(**options):
    return nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options)


def create(**options):
    return MultiHeadAttention(4, 16, rngs=nnx.Rngs(0, dropout=7), **options)


def flax_attention(**options):
    """Returns a module of Flax with random parameters."""
    return random_layer(nnx.MultiHeadAttention, 4, 16, decode=False, **options)


def attention(**options):
    """Returns a module with the random parameters of `flax_attention`."""
    return random_layer(MultiHeadAttention, 4, 16, **options)


def causal():
    return jnp.tri(8, dtype=bool)[None, None]


def run(model, *inputs, **options):
    return nnx.jit(lambda model, *inputs: model(*inputs, **options))(model, *inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "qkv_features": 32, "out_features": 24, "use_bias": False},
        {"in_kv_features": 12, "normalize_qk": True},
    ],
)
def test_parameters_equal_those_of_flax(options):
    ours, flax = (
        nnx.to_pure_dict(nnx.state(make(**options))) for make in (create, create_flax)
    )
    assert_equal(ours, flax)


@pytest.mark.parametrize(
    ("dp", "tp", "types", "options"),
    [
        (1, 4, "explicit", {"normalize_qk": True}),
        (2, 2, "explicit", {"num_kv_heads": 2, "sequence_parallel": False}),
        pytest.param(
            *(2, 2, "auto", {"num_kv_heads": 2, "use_bias": False}),
            marks=pytest.mark.matrix,
        ),
        # The 4 sequences do not divide into the data axis.
        pytest.param(3, 1, "auto", {}, marks=pytest.mark.matrix),
    ],
)
def test_values_and_gradients_equal_those_of_flax(dp, tp, types, options):
    x = normal(0, X)
    flax = flax_attention(
        **{k: v for k, v in options.items() if k != "sequence_parallel"}
    )

    def flax_loss(model, x):
        return jnp.sum(jnp.sin(model(x, mask=causal())))

    expected = nnx.jit(nnx.value_and_grad(flax_loss, argnums=(0, 1)))(flax, x)
    with jax.set_mesh(mesh_of(dp, tp, types)):
        model = attention(is_causal=True, **options)
        found = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, x)
    assert_trees_close(found[0], expected[0], rtol=1e-4)
    (ours, dx), (theirs, expected_dx) = found[1], expected[1]
    assert_trees_close(nnx.to_pure_dict(ours), nnx.to_pure_dict(theirs))
    assert_trees_close(dx, expected_dx)


@covering(ndim=[2, 5], types=["auto", "explicit"])
def test_batch_axes_are_free(ndim, types):
    shape = (8, 16) if ndim == 2 else (2, 1, 3, 8, 16)
    x, mask = normal(0, shape), normal(1, (*shape[:-2], 4, 8, 8)) > -1
    with jax.set_mesh(mesh_of(2, 2, types)):
        y = run(attention(), x, mask=mask)
    assert_trees_close(y, run(flax_attention(), x, mask=mask))


def test_masks_have_the_meaning_of_flax():
    x, real = normal(0, X), np.arange(8) < np.array([8, 5, 3, 1])[:, None]
    padding = real[:, None, None]  # [batch, 1, 1, tokens]
    both = nnx.make_attention_mask(real, real)  # of floats
    with jax.set_mesh(mesh_of(2, 2)):
        for mask in (padding, both):
            y = run(attention(), x, mask=mask)
            expected = run(flax_attention(), x, mask=mask)
            assert_trees_close(np.asarray(y)[real], np.asarray(expected)[real])


@pytest.mark.parametrize("types", ["auto", *nightly("explicit")])
def test_tokens_are_gathered_once_forward_and_backward_and_nothing_else(types):
    with jax.set_mesh(mesh_of(2, 2, types)):
        graph, state = nnx.split(attention(use_bias=False))
        x = jax.device_put(normal(0, X), P("dp", "tp"))

        def forward(state, x):
            return nnx.merge(graph, state)(x, residual=x)

        text = compiled_text(jax.jit(forward), state, x)
        assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
        assert not collectives(text)

        def value(state, x):
            return jnp.sum(jnp.sin(forward(state, x)))

        text = compiled_text(jax.jit(jax.grad(value, argnums=(0, 1))), state, x)
    # The backward pass gathers dy once, and q, k and v share one call.
    assert calls(text) == {
        "all_gather_matmul": 2,
        "matmul_reduce_scatter": 2,
        "wgrad": 2,
    }


def test_keys_and_values_of_other_inputs_share_one_gather():
    q, kv, v = normal(0, X), normal(1, (4, 12, 12)), normal(2, (4, 12, 12))
    flax = flax_attention(in_kv_features=12)
    with jax.set_mesh(mesh_of(2, 2)):
        model = attention(in_kv_features=12)
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, q, kv: nnx.merge(graph, state)(q, kv))
        assert calls(compiled_text(program, state, q, kv))["all_gather_matmul"] == 2
        assert_trees_close(program(state, q, kv), run(flax, q, kv))
        assert_trees_close(run(model, q, kv, v), run(flax, q, kv, v))


def test_a_projection_may_lack_the_bias_of_the_others():
    x, ours, flax = normal(0, X), attention(), flax_attention()
    ours.key.bias = flax.key.bias = None
    with jax.set_mesh(mesh_of(1, 2)):
        assert_trees_close(run(ours, x), run(flax, x))


def test_inside_shard_map_each_rank_has_some_heads():
    x, mask = normal(0, X), normal(1, (4, 4, 8, 8)) > -1
    graph, state = nnx.split(attention(num_kv_heads=2))
    specs = nnx.get_partition_spec(state)
    assert specs.query.kernel.get_value() == P(None, "tp", None)
    assert specs.query.bias.get_value() == P("tp", None)
    assert specs.out.kernel.get_value() == P("tp", None, None)
    y = jax.jit(
        jax.shard_map(
            lambda state, x, mask: nnx.merge(graph, state)(x, mask=mask),
            mesh=mesh_of(2, 2),
            in_specs=(specs, P("dp", "tp"), P("dp", "tp")),
            out_specs=P("dp", "tp"),
        )
    )(state, x, mask)
    assert_trees_close(y, run(flax_attention(num_kv_heads=2), x, mask=mask))


def test_rotary_embeddings_rotate_complex_numbers():
    x = normal(0, (2, 5, 3, 8))
    positions = np.array([[0, 1, 2, 3, 9], [4, 3, 2, 1, 0]])
    speeds = 100.0 ** (-np.arange(4) / 4)
    turns = np.exp(1j * positions[..., None, None] * speeds)
    y = (np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])) * turns
    expected = np.concatenate([y.real, y.imag], axis=-1)
    assert_trees_close(rotate(x, positions, 100.0), expected)


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_rotary_attention_depends_on_distances_only(types):
    x = normal(0, X)
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = attention(rotary_base=100.0, is_causal=True)
        y = run(model, x)
        moved = run(model, x, positions=jnp.arange(8) + 5)
        spread = run(model, x, positions=jnp.stack([2 * jnp.arange(8)] * 4))
    assert_trees_close(moved, y)
    assert np.abs(np.asarray(spread) - np.asarray(y)).max() > 0.01


def test_an_attention_fn_gets_one_rank_s_shards():
    seen = []

    def attend(q, k, v, **options):
        seen.append((q.shape, k.shape, options))
        return jax.nn.dot_product_attention(q, k, v, **options)

    with jax.set_mesh(mesh_of(2, 2)):
        model = attention(attention_fn=attend, num_kv_heads=2, is_causal=True)
        run(model, normal(0, X))
    assert seen == [((2, 8, 2, 4), (2, 8, 1, 4), {"mask": None, "is_causal": True})]


def test_the_attention_fn_may_be_replaced():
    def attend(q, k, v, **options):
        return 2 * jax.nn.dot_product_attention(q, k, v, **options)

    x = normal(0, X)
    with jax.set_mesh(mesh_of(1, 2)):
        model, made = attention(), attention(attention_fn=attend)
        assert model.attention_fn is None
        model.attention_fn = attend
        assert model.attention_fn is attend
        assert_equal(run(model, x), run(made, x))
        with pytest.raises(UnknownNameError, match="attention_fn = 3 is not a hash"):
            model.attention_fn = 3


class TestDropout:
    """Dropout of attention weights."""

    def test_nothing_is_dropped_where_the_module_is_deterministic(self):
        x = normal(0, X)
        expected = run(flax_attention(), x)
        with jax.set_mesh(mesh_of(2, 2)):
            model = attention(dropout_rate=0.5)
            assert_trees_close(run(model, x, deterministic=True), expected)
            assert np.abs(np.asarray(run(model, x)) - np.asarray(expected)).max() > 0.1
            model.eval()
            assert_trees_close(run(model, x), expected)

    @pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
    def test_ranks_have_different_dropout_masks(self, types):
        # With equal tokens and heads, results differ only by their dropout masks.
        q, v = (np.full((2, 8, 4, 4), value, "float32") for value in (0, 1))
        mesh = mesh_of(2, 2, types)
        core = CoreAttention(
            ShardingLayout("row", mesh=mesh), None, True, dropout_rate=0.5
        )
        y = core(q, q, v, dropout_key=jax.random.key(0))
        heads = np.asarray(y)[..., 0].transpose(0, 2, 1).reshape(4, 2, 8)
        for own in heads:  # of a rank: broadcast_dropout
            assert_equal(own[0], own[1])
        assert len(np.unique(heads[:, 0], axis=0)) == 4

    def test_an_attention_fn_gets_the_dropout_arguments(self):
        seen = {}

        def attend(q, k, v, **options):
            seen.update(options)
            return q

        with jax.set_mesh(mesh_of(1, 2)):
            model = attention(attention_fn=attend, dropout_rate=0.25)
            run(model, normal(0, X))
        assert seen["dropout_rate"] == 0.25
        assert seen["broadcast_dropout"]
        assert seen["dropout_rng"] is not None


def test_main_grads_of_heads_are_accumulated():
    x = normal(0, X)
    with jax.set_mesh(mesh_of(1, 2)):
        model = attention(main_grad=True)
        graph, params, main_grads = nnx.split(model, nnx.Param, MainGrad)

        def total(params, main_grads):
            return loss(nnx.merge(graph, params, main_grads), x)

        ones = jax.tree.map(jnp.ones_like, main_grads)
        own, found = jax.jit(jax.grad(total, argnums=(0, 1)))(params, ones)
    expected = loss_and_gradients(flax_attention(), x)[1]
    for name in ("query", "key", "value", "out"):
        assert_trees_close(
            found[name].main_grad.get_value(), expected[name].kernel.get_value() + 1
        )
        assert not np.any(own[name].kernel.get_value())


def test_a_main_grad_of_heads_in_two_calls_is_rejected():
    with jax.set_mesh(mesh_of(1, 2)):
        model = attention(main_grad=True)
        gradient = nnx.grad(
            lambda model, x: jnp.sum(model(model(x))),
            argnums=nnx.DiffState(0, MainGrad),
        )
        refused = pytest.raises(ub.errors.ShapeContractError, match="another call")
        with refused:
            nnx.jit(gradient)(model, normal(0, X))


REFUSALS = [
    ({"num_kv_heads": 3}, r"num_heads = 4 is not a multiple of num_kv_heads = 3.*= 6"),
    (
        {"qkv_features": 18},
        r"qkv_features = 18 is not a multiple of num_heads = 4.*= 20",
    ),
    ({"qkv_features": 12, "rotary_base": 1e4}, r"heads of 3 features.*pairs.*= 16"),
    ({"num_kv_heads": 2}, r"num_kv_heads = 2 does not divide into the 4 ranks.*Use 4"),
]


@pytest.mark.parametrize(("options", "text"), REFUSALS)
def test_indivisible_heads_are_rejected(options, text):
    with (
        jax.set_mesh(mesh_of(1, 4)),
        pytest.raises(ub.errors.ShapeContractError, match=text),
    ):
        create(**options)


def test_indivisible_heads_are_rejected_if_the_mesh_is_set_later():
    model = attention(num_kv_heads=2)
    text = REFUSALS[-1][1]
    with (
        jax.set_mesh(mesh_of(1, 4)),
        pytest.raises(ub.errors.ShapeContractError, match=text),
    ):
        model(normal(0, X))


def test_operands_of_other_shapes_are_rejected():
    x = normal(0, X)
    with jax.set_mesh(mesh_of(1, 2)):
        model = attention(rotary_base=1e4)
        with pytest.raises(
            ub.errors.UnsupportedOverlapError, match=r"rotary_base.*rotary_base=None"
        ):
            model(x, normal(1, X))
        refused = functools.partial(pytest.raises, ub.errors.ShapeContractError)
        with refused(match=r"mask has shape \(1, 4, 1, 8, 8\).*to \(4, 4, 8, 8\)"):
            model(x, mask=jnp.ones((1, 4, 1, 8, 8), bool))
        with refused(match=r"positions has shape \(2, 8\).*to \(4, 8\)"):
            model(x, positions=jnp.ones((2, 8), int))
        attend = attention()
        with refused(match=r"queries have shape \(4, 8, 4, 4\), keys \(2, 8, 4, 4\)"):
            attend(x, jnp.ones((2, 8, 16)))
        with refused(match=r"keys \(2, 3, .*Pass inputs of the same sequences"):
            attend(jnp.ones((3, 2, *X[1:])), jnp.ones((2, 3, *X[1:])))
        with refused(match=r"values \(4, 4, 4, 4\).*inputs_v with as many tokens"):
            attend(x, x, jnp.ones((4, 4, 16)))


def test_arguments_have_the_names_of_flax():
    ours, flax = (
        inspect.signature(kind.__init__).parameters
        for kind in (MultiHeadAttention, nnx.MultiHeadAttention)
    )
    positional = [name for name, p in flax.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert set(positional) <= set(ours)
