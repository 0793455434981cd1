"""`ub.overlap` and `Overlap` for all layers and parameters of a model."""

import functools
import re
import warnings

import flax.linen as nn
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
    random_variables,
)
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, compiled_text

import jax_ub as ub
from jax_ub.errors import UnsupportedOverlapError
from jax_ub.flax import Linear
from jax_ub.flax.linen import Overlap


def init(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class OwnEinsum(nnx.Module):
    """A dense layer that Flax does not have."""

    def __init__(self, rngs, names=(None, "tp")):
        self.w = nnx.Param(init(*names)(rngs.params(), (16, 16)))


class Half(nnx.Module):
    """A model with overlapped and other layers."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=init(None, "tp"))
        self.own = OwnEinsum(rngs)
        self.ours = Linear(16, 32, parallel="column", rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)


def notes_of(labels):
    found = {note.label: note.reason for note in ub.fallbacks()}
    return {label: found[f"overlap({label!r})"] for label in labels}


def test_parameters_that_are_sharded_but_not_overlapped_are_recorded():
    with jax.set_mesh(mesh_of(1, 2)):
        before = len(ub.fallbacks())
        model = ub.overlap(Half(nnx.Rngs(0)))
        assert ub.overlapped(model) == {"up": "column"}
        assert [note.label for note in ub.fallbacks()[before:]] == ["overlap('own.w')"]
        assert notes_of(["own.w"])["own.w"] == (
            "the parameter, sharded P(None, 'tp'), belongs to a OwnEinsum, which "
            "overlap does not know"
        )
        ub.overlap(nnx.List([Half(nnx.Rngs(0))]), {"0.up": None, ".*": None})
    reason = notes_of(["0.up.kernel"])["0.up.kernel"]
    assert reason.endswith("belongs to the layer '0.up', which no rule overlaps")


def test_a_tied_head_is_overlapped():
    x = normal(0, (4, 8, 16))
    plain = nnx.Embed(24, 16, rngs=nnx.Rngs(0))
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(plain.attend(x))))(x)
    for names, kind in ((("tp", None), "column"), ((None, "tp"), "row")):
        with jax.set_mesh(mesh_of(1, 2)):
            embed = nnx.Embed(24, 16, rngs=nnx.Rngs(0), embedding_init=init(*names))
            embed.embedding.set_value(
                jax.device_put(plain.embedding[...], jax.P(*names))
            )
            model = ub.overlap(nnx.List([embed]))
            assert ub.overlapped(model) == {"0.attend": kind}
            assert_trees_close(model[0](jnp.arange(3)), plain(jnp.arange(3)))
            program = jax.jit(
                jax.grad(lambda x, e=embed: jnp.sum(jnp.sin(e.attend(x))))
            )
            assert sum(calls(compiled_text(program, x)).values()) == 2
            assert_trees_close(program(x), expected, rtol=1e-4, atol=1e-4)


class LinenNet(nn.Module):
    """A dense layer, an einsum with a bias, a tied head and a custom module."""

    def setup(self):
        self.up = nn.Dense(32)
        self.down = nn.Einsum((32, 16), "BTN,ND->BTD")
        self.embed = nn.Embed(24, 16)

    def __call__(self, x):
        return self.embed.attend(self.down(self.up(x)))


def test_einsums_and_tied_heads_of_linen_are_overlapped():
    net, x = LinenNet(), normal(0, (4, 8, 16))
    variables = jax.tree.map(lambda v: v + 0.1, random_variables(net, x))
    kinds = {"up": "column", "down": "row", "embed.attend": "column"}

    def loss(variables):
        return jnp.sum(jnp.sin(net.apply(variables, x)))

    expected = jax.jit(jax.value_and_grad(loss))(variables)
    with jax.set_mesh(mesh_of(1, 2)), Overlap(kinds) as overlap:
        program = jax.jit(jax.value_and_grad(loss))
        text = compiled_text(program, variables)
        found = program(variables)
        assert_trees_close(
            net.init(jax.random.key(0), x), net.init(jax.random.key(0), x)
        )
    assert overlap.overlapped == kinds
    assert calls(text)["wgrad"] == 3
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_einsum_of_linen_that_is_not_a_dense_layer_must_be_free_to_fall_back():
    net, x = nn.Einsum((4, 16), "TK,TK->T", use_bias=False), normal(0, (4, 16))
    variables = net.init(jax.random.key(0), x)
    expected, mesh = net.apply(variables, x), mesh_of(1, 2)
    rules, reason = {"": "row"}, "'TK,TK->T' is not a dense layer"
    with jax.set_mesh(mesh), Overlap(rules):
        assert_trees_close(net.apply(variables, x), expected)
    assert ub.fallbacks()[-1].reason == reason
    text = f"{reason}. Call the layer with each label in two of x, kernel and result"
    with jax.set_mesh(mesh), Overlap(rules, method="direct"):
        assert_trees_close(net.init(jax.random.key(0), x), variables)
        with pytest.raises(UnsupportedOverlapError, match=re.escape(text)):
            net.apply(variables, x)
    text = f"{reason}, and inside shard_map over 'tp' nothing else would communicate"
    apply = jax.shard_map(net.apply, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    with Overlap(rules), pytest.raises(UnsupportedOverlapError, match=re.escape(text)):
        apply(variables, x)


def test_an_einsum_of_linen_with_an_ellipsis_in_the_kernel_is_not_a_dense_layer():
    net = nn.Einsum((3, 16, 4), "TK,...KN->...TN", use_bias=False)
    x = normal(0, (4, 16))
    variables = random_variables(net, x)
    expected = net.apply(variables, x)
    with jax.set_mesh(mesh_of(1, 2)), Overlap({"": "column"}):
        assert_trees_close(net.apply(variables, x), expected)
    assert ub.fallbacks()[-1].reason == "'TK,...KN->...TN' is not a dense layer"


@pytest.mark.parametrize("equation", ["TK,KN", "TK->T", "T,K,N->TKN", "TK,KN->T->N"])
def test_an_invalid_equation_of_linen_raises_the_error_of_flax(equation):
    net, x = nn.Einsum((16, 8), equation, use_bias=False), normal(0, (4, 16))
    variables = {"params": {"kernel": normal(1, (16, 8))}}
    with pytest.raises(ValueError) as expected:
        net.apply(variables, x)
    text = re.escape(str(expected.value))
    with (
        jax.set_mesh(mesh_of(1, 2)),
        Overlap({"": "column"}),
        pytest.raises(ValueError, match=text),
    ):
        net.apply(variables, x)


class OwnDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (16, 16))


def test_rules_of_linen_that_match_nothing_warn_once():
    net, x = nn.Dense(32, name="up"), normal(0, (4, 16))
    variables = random_variables(net, x)
    text = r"the rules \['down', 'fc2'\] matched no nn.Dense.* overlapped \[''\]\. Kn"
    with (
        pytest.warns(UserWarning, match=text),
        jax.set_mesh(mesh_of(1, 2)),
        Overlap({"": "column", "down": "row"}, ub_names={"fc2": "fc2"}) as overlap,
    ):
        net.apply(variables, x)
    assert overlap.unmatched == ("down", "fc2")
    with warnings.catch_warnings(), overlap:
        warnings.simplefilter("error")
        net.apply(variables, x)


def test_a_block_in_which_nothing_is_traced_warns():
    net, x = nn.Dense(32, name="up"), normal(0, (4, 16))
    variables = random_variables(net, x)
    with jax.set_mesh(mesh_of(1, 2)):
        apply = jax.jit(net.apply).lower(variables, x).compile()
        text = "no module was called in the block. A compiled function"
        # No block with equal rules has matched a layer in this process.
        with pytest.warns(UserWarning, match=text), Overlap({"untraced": "column"}):
            apply(variables, x)


def test_an_interceptor_that_reaches_nothing_warns():
    net, x = OwnDense(), normal(0, (4, 16))
    variables = random_variables(net, x)
    overlap = Overlap({"(.*)": "column"})  # has matched no layer of another test
    with nn.intercept_methods(overlap):
        with pytest.warns(
            UserWarning, match="matched no nn.Dense.* overlapped nothing"
        ):
            net.apply(variables, x)
        net.apply(variables, x)  # once
    assert ub.fallbacks()[-1].label == "overlap('kernel')"
    reason = "the parameter belongs to a OwnDense, which overlap does not know"
    assert ub.fallbacks()[-1].reason == reason


RULES_OF_AXES = (("embed", None), ("mlp", "tp"))


@pytest.mark.parametrize(
    "partitioned",
    [
        functools.partial(nn.with_partitioning, names=(None, "tp")),
        functools.partial(nn.with_logical_partitioning, names=("embed", "mlp")),
        functools.partial(
            nn.with_logical_partitioning, names=("embed", "mlp"), rules=RULES_OF_AXES
        ),
    ],
)
def test_parameters_of_linen_that_are_sharded_but_not_overlapped_are_recorded(
    partitioned,
):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel_init = partitioned(nn.initializers.ones)
            x = nn.Dense(32, kernel_init=kernel_init, name="up")(x)
            return nn.Dense(16, name="down")(x)

    net, x = Net(), normal(0, (4, 16))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    ub.fallbacks(clear=True)
    with (
        jax.set_mesh(mesh_of(1, 2)),
        nn.logical_axis_rules(RULES_OF_AXES),
        Overlap({"down": "row"}),
    ):
        jax.eval_shape(net.apply, variables, x)
    reason = notes_of(["up.kernel"])["up.kernel"]
    assert reason == (
        "the parameter, sharded P(None, 'tp'), belongs to a Dense, which no rule "
        "overlaps"
    )


def test_a_layer_of_linen_that_a_rule_excludes_is_no_fallback():
    net = nn.Sequential([nn.Dense(32), nn.Dense(16)])
    x = normal(0, (4, 16))
    variables = random_variables(net, x)
    rules = {"layers_1": None, r"layers_\d": "column"}
    ub.fallbacks(clear=True)
    with jax.set_mesh(mesh_of(1, 2)), Overlap(rules) as overlap:
        jax.eval_shape(net.apply, variables, x)
    assert overlap.overlapped == {"layers_0": "column"}
    assert ub.fallbacks() == ()


def test_a_module_that_shares_the_scope_of_an_overlapped_layer_is_no_fallback():
    class Adapted(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "tp"))
            dense = nn.Dense(32, kernel_init=kernel_init)
            nn.share_scope(self, dense)
            a = self.param("a", nn.initializers.ones, (16, 2))
            return dense(x) + (x @ a).sum(-1, keepdims=True)

    net, x = nn.Sequential([Adapted()]), normal(0, (4, 16))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    ub.fallbacks(clear=True)
    with jax.set_mesh(mesh_of(1, 2)), Overlap({"layers_0": "column"}) as overlap:
        jax.eval_shape(net.apply, variables, x)
    assert overlap.overlapped == {"layers_0": "column"}
    # The layer does not multiply by "a".
    assert [each.label for each in ub.fallbacks()] == ["overlap('layers_0.a')"]


CONFIGURED = {"fc1_fprop": {"method": "pipeline", "num_splits": 2}}


def labels(program, *args):
    return {row.scope: row.method for row in ub.explain(program, *args).rows}


def test_names_reach_the_configuration_of_an_nnx_model():
    mesh, x = mesh_of(1, 2), normal(0, (2, 8, 16))
    ub.initialize_ub((16, 32), 2, ub_cfgs=CONFIGURED, mesh=mesh, dtype=jnp.float32)
    with jax.set_mesh(mesh):
        model = nnx.Sequential(
            nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        )
        rules = {"layers.0": "column", "layers.1": "row"}
        ub.overlap(model, rules, ub_names={r".*\.0": "fc1", r".*\.1": "fc2"})
        found = labels(lambda x: model(x), x)
        assert found["fc1"] == "pipeline"
        assert "fc2" in found
        text = "overlap: 'up' of ub_names matches no overlapped layer of the model"
        with pytest.raises(ub.errors.UnknownNameError, match=text):
            ub.overlap(model, rules, ub_names={"up": "fc1"})
        with pytest.raises(ub.errors.UnknownNameError, match="a name of type int"):
            ub.overlap(model, rules, ub_names={".*": 1})


def test_names_reach_the_configuration_of_a_linen_model():
    mesh, x = mesh_of(1, 2), normal(0, (2, 8, 16))
    net = nn.Sequential([nn.Dense(32), nn.Dense(16)])
    variables = random_variables(net, x)
    ub.initialize_ub((16, 32), 2, ub_cfgs=CONFIGURED, mesh=mesh, dtype=jnp.float32)
    rules = {"layers_0": "column", "layers_1": "row"}
    with jax.set_mesh(mesh), Overlap(rules, ub_names={"layers_0": "fc1"}):
        found = labels(lambda x: net.apply(variables, x), x)
    assert found["fc1"] == "pipeline"
    with pytest.raises(ub.errors.UnknownNameError, match="a name of type int"):
        Overlap(rules, ub_names={".*": 1})


class DenseNamedAsOverlaps(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="qkv")(nn.Dense(32, name="fc1")(x))


def test_a_path_that_equals_a_configured_name_is_only_a_label():
    mesh, x = mesh_of(1, 2), normal(0, (2, 8, 16))
    ub.initialize_ub((16, 8), 2, ub_cfgs=CONFIGURED, mesh=mesh, dtype=jnp.float32)
    rules = {"fc1": "column", "qkv": "row"}  # "qkv_fprop" is an all-gather
    dict_model = nnx.Dict(
        fc1=nnx.Linear(16, 32, rngs=nnx.Rngs(0)),
        qkv=nnx.Linear(32, 16, rngs=nnx.Rngs(0)),
    )
    net = DenseNamedAsOverlaps()
    variables = random_variables(net, x)
    with jax.set_mesh(mesh):
        model = ub.overlap(dict_model, rules)
        assert labels(lambda x: model.qkv(model.fc1(x)), x) == dict.fromkeys(
            rules, "direct"
        )
        with Overlap(rules):
            found = labels(lambda x: net.apply(variables, x), x)
    assert found == dict.fromkeys(rules, "direct")


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_several_axes_are_taken_as_one(types):
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[types]
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("dp", "cp", "tp"), axis_types=(kind,) * 3)
    axes, x = ("cp", "tp"), normal(0, (4, 8, 16))

    def net(*specs):
        sizes = ((16, 32), (32, 16))
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            *(
                nnx.Linear(*size, rngs=rngs, kernel_metadata={"out_sharding": spec})
                for size, spec in zip(sizes, specs, strict=True)
            )
        )

    expected = nnx.grad(lambda m: jnp.sum(jnp.sin(m(x))))(net((), ()))
    with jax.set_mesh(mesh):
        model = net((None, axes), (axes, None))
        with pytest.raises(ub.errors.ShapeContractError, match="selects no layer"):
            ub.overlap(net((None, "cp"), (None, None)), axis_name=axes)
        ub.overlap(model, axis_name=axes)
        assert ub.overlapped(model) == {"layers.0": "column", "layers.1": "row"}
        program = nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.sin(m(x)))))
        found = program(model)
        text = compiled_text(jax.jit(lambda x: model(x)), x)
    assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    actual, expected = map(nnx.to_pure_dict, (found, expected))
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_on_several_axes():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, x = Mesh(devices, ("cp", "tp")), normal(0, (4, 8, 16))
    with jax.set_mesh(mesh):
        options = {"parallel": "column", "axis_name": ("cp", "tp")}
        layer = Linear(16, 32, rngs=nnx.Rngs(0), **options)
        assert layer.kernel[...].sharding.spec == jax.P(None, ("cp", "tp"))
        ub.fallbacks(clear=True)
        y = jax.jit(lambda x: layer(x))(x)
    assert not ub.fallbacks()
    assert_trees_close(y, x @ np.asarray(layer.kernel[...]))


def test_a_misspelt_rule_of_linen_names_the_nearest_path():
    net, x = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)]), normal(0, (4, 16))
    variables = random_variables(net, x)
    text = r"Did you mean 'layers_0'\? Known: 'layers_0', 'layers_2'"
    with pytest.warns(UserWarning, match=text), Overlap({"layer_0": "column"}):
        net.apply(variables, x)


class Adapted(nnx.Module):
    """A block whose layers have low-rank adapters."""

    def __init__(self):
        initializer = nnx.initializers.lecun_normal()
        options = {"b_initializer": initializer, "rngs": nnx.Rngs(0)}
        self.up = nnx.LoRALinear(16, 32, lora_rank=2, **options)
        down = nnx.Linear(32, 16, rngs=nnx.Rngs(1))
        self.down = nnx.LoRA(32, 2, 16, base_module=down, **options)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


@covering(
    types=["explicit", *nightly("auto")], tokens=[P("dp"), *nightly(P("dp", "tp"))]
)
def test_adapters_of_frozen_layers_are_trained(types, tokens):
    x = normal(0, (4, 8, 16))
    rules = {"up": "column", r"down\.base_module": "row"}
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    expected = nnx.value_and_grad(loss, argnums=adapters)(Adapted(), x)
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = ub.overlap(Adapted(), rules)
        run = nnx.jit(nnx.value_and_grad(loss, argnums=adapters))
        found = run(model, jax.device_put(x, P(*tokens)))
        text = compiled_text(run, model, jax.device_put(x, P(*tokens)))
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
    # Frozen kernels have no weight gradient.
    assert calls(text) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1}


class FusedGate(nnx.Module):
    """A gate and an up projection in one kernel [features, 2, hidden]."""

    def __init__(self, kind, kernel_init):
        options = {"kernel_init": kernel_init, "rngs": nnx.Rngs(0)}
        if kind == "Einsum":
            self.gate_up = nnx.Einsum("BTD,DSF->BTSF", (16, 2, 32), **options)
        else:
            self.gate_up = nnx.LinearGeneral(16, (2, 32), use_bias=False, **options)
        self.down = nnx.Linear(32, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        h = self.gate_up(x)
        return x + self.down(nnx.silu(h[..., 0, :]) * h[..., 1, :])


@pytest.mark.parametrize("kind", ["Einsum", "LinearGeneral"])
def test_only_an_einsum_is_overlapped_along_a_later_dimension_of_its_kernel(kind):
    x = normal(0, (4, 8, 16))
    plain = FusedGate(kind, nnx.initializers.lecun_normal())
    expected = loss_and_gradients(plain, x)
    with jax.set_mesh(mesh_of(2, 4)):
        model = FusedGate(kind, init(None, None, "tp"))
        ub.overlap(model, {"gate_up": "column", "down": "row"})
        ub.fallbacks(clear=True)
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)
    reasons = [each.reason for each in ub.fallbacks()]
    text = "the kernel has 2 out features, which do not divide into the 4 ranks"
    assert len(reasons) == (kind == "LinearGeneral")
    assert all(text in reason for reason in reasons)
