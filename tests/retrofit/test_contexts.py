"""An overlapped model runs on every mesh and in every context of the plain model."""

import contextlib
import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import linen as nn
from flax import nnx
from flax_models import (
    assert_trees_close,
    loss,
    loss_and_gradients,
    mesh_of,
    plain_block,
    random_model,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, compiled_text

import jax_ub as ub
import jax_ub.flax as ub_nnx
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub.flax import linen as ub_linen

FUSED = {"all_gather_matmul": 2, "matmul_reduce_scatter": 1}
SPECS = {"up": P(None, "tp"), "down": P("tp"), "embed": P("tp")}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)

        def init(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=init(None, "tp"))
        self.down = nnx.Linear(32, 16, rngs=rngs, kernel_init=init("tp", None))
        self.embed = nnx.Embed(24, 16, rngs=rngs, embedding_init=init("tp", None))

    def __call__(self, x):
        return self.embed.attend(self.down(self.up(x)))


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 8, 16))


@pytest.fixture(scope="module")
def plain():
    with jax.set_mesh(mesh_of(1, 1)):
        return nnx.merge(*nnx.split(jax.device_get(random_model(Net))))


def overlapped(on, **options):
    with jax.set_mesh(on):
        return ub.overlap(random_model(Net), **options)


@covering(module=[pickle, "cloudpickle", copy], given=[False, True])
def test_an_overlapped_model_is_copied(module, given, x):
    mesh = mesh_of(1, 2)
    options = {"mesh": mesh} if given else {}
    model = overlapped(mesh, **options)
    if module is copy:
        copied = copy.deepcopy(model)
    else:
        if isinstance(module, str):
            module = pytest.importorskip(module, reason=f"{module} is not installed")
        copied = pickle.loads(module.dumps(model))
        graph = nnx.graphdef(model)
        assert pickle.loads(module.dumps(graph)) == graph
    assert ub.overlapped(copied) == ub.overlapped(model)
    assert copied.up.dot_general == model.up.dot_general
    assert copied.up.dot_general.sharding_layout.mesh == options.get("mesh")
    call = nnx.jit(lambda model, x: model(x))
    with jax.set_mesh(mesh):
        assert_trees_close(call(copied, x), call(model, x))


def test_a_mesh_of_missing_devices_is_dropped(monkeypatch):
    sharding_layout = pickle.dumps(ShardingLayout("column", mesh=mesh_of(1, 4)))
    found = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: found)
    assert pickle.loads(sharding_layout) == ShardingLayout("column")


def test_equal_models_have_equal_graphs_on_any_mesh():
    graphs = [nnx.graphdef(overlapped(mesh)) for mesh in (mesh_of(1, 2), mesh_of(2, 4))]
    assert graphs[0] == graphs[1]
    assert hash(graphs[0]) == hash(graphs[1])


LAYERS = {
    "Linear": (16, 32),
    "LayerNormLinear": (16, 32),
    "LayerNormMLP": (16, 32),
    "MultiHeadAttention": (4, 16),
    "TransformerLayer": (16, 32, 4),
}


# A transformer layer has an MLP and attention.
SAMPLE = ["Linear", "LayerNormLinear", "TransformerLayer"]
SAMPLE += nightly("LayerNormMLP", "MultiHeadAttention")


@pytest.mark.parametrize("name", SAMPLE)
def test_layers_with_a_mesh_are_copied(name):
    mesh, x = mesh_of(1, 2), normal(0, (2, 4, 16))
    kind = {"parallel": "column"} if name.endswith("Linear") else {}
    options = {"mesh": mesh, **kind}
    layer = getattr(ub_nnx, name)(*LAYERS[name], rngs=nnx.Rngs(0), **options)
    call = nnx.jit(lambda layer, x: layer(x))
    expected = call(layer, x)
    for copied in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert nnx.graphdef(copied) == nnx.graphdef(layer)
        assert_trees_close(call(copied, x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_linen_layers_with_a_mesh_are_copied(name):
    sizes = LAYERS[name]
    sizes = sizes[1:] if name.endswith("Linear") else sizes
    kind = {"parallel": "column"} if name.endswith("Linear") else {}
    layer = getattr(ub_linen, name)(*sizes, mesh=mesh_of(1, 2), **kind)
    assert copy.deepcopy(layer).mesh == layer.mesh
    # Initializers of Flax are closures, which pickle cannot store.
    initializers = {
        "kernel_init": nn.initializers.ones,
        "bias_init": nn.initializers.zeros,
    }
    layer = layer.clone(**initializers)
    assert pickle.loads(pickle.dumps(layer)) == layer


def test_interceptors_and_products_are_copied():
    mesh = mesh_of(1, 2)
    product = ub.dot_general("row", mesh=mesh)
    assert pickle.loads(pickle.dumps(product)) == product
    assert copy.deepcopy(product) == product
    net, x = nn.Dense(32), normal(0, (4, 16))
    variables = net.init(jax.random.key(0), x)
    overlap = ub_linen.Overlap({"": "column"}, mesh=mesh)
    for copied in (pickle.loads(pickle.dumps(overlap)), copy.deepcopy(overlap)):
        with nn.intercept_methods(copied):
            assert_trees_close(net.apply(variables, x), net.apply(variables, x))
        assert copied.overlapped == {"": "column"}


def device_mesh(first, *sizes, names=("dp", "tp")):
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=types)


MESHES = {
    "the same devices": (device_mesh(0, 1, 2), FUSED),
    "other devices": (device_mesh(4, 1, 2), FUSED),
    "more ranks": (device_mesh(0, 2, 4), FUSED),
    "permuted axes": (device_mesh(0, 4, 2, names=("tp", "dp")), FUSED),
    "ranks that do not divide the features": (device_mesh(0, 1, 3), {}),
    "no such axis": (device_mesh(0, 2, 2, names=("x", "y")), {}),
}


@covering(name=MESHES, known=["set_mesh", "arrays"])
def test_parameters_may_move_to_another_mesh(name, known, x, plain):
    mesh, expected = MESHES[name]
    graph, state = nnx.split(overlapped(mesh_of(1, 2)))
    divides = bool(expected)

    def place(path, leaf):
        spec = SPECS[path[0].key] if divides and leaf.ndim > 1 else P()
        return jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec))

    state = jax.tree.map_with_path(place, state)
    x_there = jax.device_put(x, NamedSharding(mesh, P()))
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    if name == "no such axis":
        warns = pytest.warns(UserWarning, match="'tp' is not an axis of the mesh {'x'")
    else:
        warns = contextlib.nullcontext()
    here = jax.set_mesh(mesh) if known == "set_mesh" else contextlib.nullcontext()
    with here, warns:
        text = compiled_text(program, state, x_there)
    with jax.set_mesh(mesh) if known == "set_mesh" else contextlib.nullcontext():
        y = program(state, x_there)  # warns once only
    assert calls(text) == expected
    assert_trees_close(y, plain(x))
    assert y.sharding.device_set == set(mesh.devices.flat)


def test_parameters_on_one_device_fall_back_to_jax(x, plain):
    graph, state = nnx.split(overlapped(mesh_of(1, 2)))
    state = jax.tree.map(np.asarray, state)
    assert_trees_close(nnx.merge(graph, state)(x), plain(x))
    reason = "no mesh is known here: call the layer under jax.set_mesh(mesh), or pass"
    assert reason in ub.fallbacks()[-1].reason


def test_whole_kernels_are_multiplied_inside_a_shard_map(x, plain):
    graph, state = nnx.split(overlapped(mesh_of(1, 2)))
    state = jax.tree.map(np.asarray, state)

    def run(mesh, rows):
        body = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh,
            in_specs=(P(), rows),
            out_specs=rows,
        )
        return jax.jit(body)(state, x)

    # Data parallel over all axes, or on a mesh without the axis.
    assert_trees_close(run(mesh_of(2, 2), P(("dp", "tp"))), plain(x))
    reason = "the kernel is whole inside this jax.shard_map"
    assert ub.fallbacks()[-1].reason == reason
    text = r"'tp' is not an axis of the mesh {'data': 4}.* See docs/retrofit\.md"
    with pytest.warns(UserWarning, match=text):
        y = run(device_mesh(0, 4, names=("data",)), P("data"))
    assert_trees_close(y, plain(x))


@pytest.mark.parametrize("equation", ["BTD,DNH->BTNH", "BTD,DNH->BTHN"])
def test_whole_kernels_of_einsums_are_multiplied_inside_a_shard_map(x, equation):
    # The sharded label, H, is not the first one of the outputs or of the equation.
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, "tp"))
    shape = (16, 6, 4)
    with jax.set_mesh(mesh_of(1, 2)):
        layer = nnx.Einsum("BTD,DNH->BTNH", shape, kernel_init=init, rngs=nnx.Rngs(0))
        expected = np.einsum(equation, x, np.asarray(layer.kernel[...]))
        graph, state = nnx.split(ub.overlap(layer))
        body = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x, equation),
            in_specs=(P(), P(None, "tp")),
            out_specs=P(None, "tp"),
        )
        assert_trees_close(jax.jit(body)(state, x), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_whole_kernels_of_stacked_layers_are_multiplied_inside_a_shard_map(x, dim):
    axes = nnx.StateAxes({nnx.Param: dim})

    def run(layers, x):
        mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, None))
        return mapped(layers, x)

    with jax.set_mesh(mesh_of(1, 2)):
        make = nnx.vmap(
            lambda key: nnx.Linear(16, 32, rngs=nnx.Rngs(key)), out_axes=axes
        )
        layers = make(jax.random.split(jax.random.key(0), 3))
        expected = run(layers, x)
        graph, state = nnx.split(ub.overlap(layers, {"": "column"}))
        body = jax.shard_map(
            lambda state, x: run(nnx.merge(graph, state), x),
            in_specs=(P(), P(None, "tp")),
            out_specs=P(None, None, "tp"),
        )
        assert_trees_close(jax.jit(body)(state, x), expected)


@pytest.mark.parametrize("tokens", [None, "tp"])
def test_a_vmap_over_an_explicit_mesh_axis_falls_back_to_jax(x, tokens):
    # JAX excludes the mapped mesh axis from every shard_map inside.
    def run(model, x):
        return jnp.sum(jnp.sin(jax.vmap(lambda x: model(x))(x)))

    expected = nnx.jit(nnx.value_and_grad(run))(plain_block(), x)
    with jax.set_mesh(mesh_of(2, 2, "explicit")):
        model = plain_block()
        if tokens:
            for name in ("up", "down"):
                kernel = getattr(model, name).kernel
                kernel.set_value(jax.device_put(kernel[...], SPECS[name]))
        ub.overlap(model, {"up": "column", "down": "row"})
        ub.fallbacks(clear=True)
        found = nnx.jit(nnx.value_and_grad(run))(
            model, jax.device_put(x, P("dp", tokens))
        )
    assert_trees_close(found, expected, rtol=1e-4)
    reasons = {each.reason for each in ub.fallbacks()}
    assert reasons == {
        "jax.vmap maps a dimension that an explicit mesh axis shards, and JAX excludes "
        "this axis from jax.shard_map inside"
    }


def test_kernels_sharded_over_a_data_axis_may_move_to_a_mesh_without_it(x):
    def net(names):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Sequential(nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0)))

    with jax.set_mesh(device_mesh(0, 2, 2, names=("fsdp", "tp"))):
        model = ub.overlap(net(("fsdp", "tp")))
    graph, state = nnx.split(model)
    mesh = mesh_of(2, 2)
    state = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        assert calls(compiled_text(program, state, x)) == {"all_gather_matmul": 1}
        y = program(state, x)
        assert_trees_close(y, net((None, "tp"))(x))


class OverlapsItself(nnx.Module):
    def __init__(self, is_overlapped, rngs):
        self.block = plain_block(rngs)
        if is_overlapped:
            ub.overlap(self, {r"block\.up": "column", r"block\.down": "row"})

    def __call__(self, x):
        return self.block(x)


def test_an_nnx_module_inside_a_linen_model_overlaps_itself(x):
    def net(is_overlapped):
        block = nnx.bridge.to_linen(OverlapsItself, is_overlapped, name="block")
        return nn.Sequential([block, nn.Dense(24)])

    def learn(net):
        def run(variables):
            return jnp.sum(jnp.sin(net.apply(variables, x)))

        return jax.jit(jax.value_and_grad(run))

    variables = net(False).init(jax.random.key(0), x)
    expected = learn(net(False))(variables)
    with jax.set_mesh(mesh_of(2, 2)), ub_linen.Overlap({"layers_1": "column"}):
        program = learn(net(True))
        count = calls(compiled_text(program, variables))
        found = program(variables)
    assert count == {"all_gather_matmul": 3, "matmul_reduce_scatter": 2, "wgrad": 3}
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_of_jax_ub_inside_a_linen_model_is_no_fallback(x):
    options = {"parallel": "column", "mesh": mesh_of(1, 2)}
    layer = nnx.bridge.to_linen(ub_nnx.Linear, x.shape[-1], 32, **options)
    net = nn.Sequential([layer, nn.Dense(24)])
    variables = net.init(jax.random.key(0), x)
    ub.fallbacks(clear=True)
    with ub_linen.Overlap({"layers_[01]": "row"}) as overlap:
        table = ub.explain(lambda variables: net.apply(variables, x), variables)
    assert [row.scope for row in table.rows] == ["Sequential/layers_0", "layers_1"]
    assert table.overlapped and not ub.fallbacks()
    assert overlap.overlapped == {"layers_1": "row"}


def test_a_linen_module_inside_an_nnx_model_is_overlapped_by_a_block(x):
    class Net(nnx.Module):
        def __init__(self):
            head = nnx.bridge.ToNNX(nn.Sequential([nn.Dense(24)]), rngs=nnx.Rngs(0))
            self.block, self.head = plain_block(), nnx.bridge.lazy_init(head, x)

        def __call__(self, x):
            return self.head(self.block(x))

    expected = loss_and_gradients(Net(), x)
    with (
        jax.set_mesh(mesh_of(2, 2)),
        ub_linen.Overlap({"layers_0": "column"}) as overlap,
    ):
        model = ub.overlap(Net(), {r"block\.up": "column", r"block\.down": "row"})
        found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert overlap.overlapped == {"layers_0": "column"}
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_cloned_and_evaluated_in_the_abstract(x):
    with jax.set_mesh(mesh_of(1, 2)):
        model = ub.overlap(random_model(Net))
        assert ub.overlapped(nnx.clone(model)) == ub.overlapped(model)
        assert nnx.eval_shape(lambda m, x: m(x), model, x).shape == (4, 8, 24)
        abstract = nnx.eval_shape(lambda: ub.overlap(Net()))
        assert ub.overlapped(abstract) == ub.overlapped(model)
        graph = nnx.graphdef(abstract)
        merged = nnx.merge(graph, nnx.state(model))
        assert_trees_close(merged(x), model(x))


def test_the_kernels_mesh_supplies_devices_for_an_abstract_mesh():
    mesh = mesh_of(1, 2)
    known = ShardingLayout("column", kernel_mesh=mesh)
    found = []

    def look(x):
        found.extend([known.find_mesh(x), ShardingLayout("column").find_mesh(x)])
        return x

    jax.jit(look)(jax.device_put(np.ones(4), NamedSharding(mesh, P("tp"))))
    assert found == [mesh, mesh.abstract_mesh]
    other = NamedSharding(device_mesh(0, 2, 4), P("tp"))
    assert known.find_mesh(jax.device_put(np.ones(8), other)) == other.mesh


MISSPELT = {
    "axis_name = 'model' is not an axis of the mesh": {"axis_name": "model"},
    "data_axes has 'dpp', which is not an axis of the mesh": {"data_axes": ("dpp",)},
}
COLUMN = {"up": "column"}


def overlap_nnx(**options):
    return ub.overlap(nnx.merge(*nnx.split(plain_layer())), COLUMN, **options)


def overlap_linen(**options):
    return ub_linen.Overlap({"layers_0": "column"}, **options)


class Plain(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)


@functools.cache
def plain_layer():
    return Plain()


@covering(text=MISSPELT, make=[overlap_nnx, overlap_linen], known=["mesh", "set_mesh"])
def test_an_axis_that_the_known_mesh_lacks_is_an_error(text, make, known):
    mesh, options = device_mesh(0, 2, 2), MISSPELT[text]
    here = contextlib.nullcontext()
    if known == "mesh":
        options = {**options, "mesh": mesh}
    else:
        here = jax.set_mesh(mesh)
    text = rf"{text} {{'dp': 2, 'tp': 2}}\. "
    with here, pytest.raises(ub.errors.UnknownNameError, match=text):
        make(**options)


@pytest.mark.parametrize("text", MISSPELT)
def test_an_axis_that_the_mesh_of_a_call_lacks_is_a_warning(text, x):
    warns = pytest.warns(UserWarning, match=rf"layer 'up'.*{text} {{'dp': 2, 'tp'")
    model, overlap = overlap_nnx(**MISSPELT[text]), overlap_linen(**MISSPELT[text])
    assert_trees_close(model(x), plain_layer()(x))  # no mesh is known here
    net = nn.Sequential([nn.Dense(32)])
    variables = net.init(jax.random.key(0), x)
    with jax.set_mesh(device_mesh(0, 2, 2)):
        with warns:
            assert_trees_close(model(x), plain_layer()(x))
        model(x)
        with overlap:  # the warning has the same cause
            net.apply(variables, x)
    here = jax.set_mesh(device_mesh(0, 2, 2, names=("dp", "tpp")))
    with here, overlap, pytest.warns(UserWarning, match="{'dp': 2, 'tpp': 2}"):
        net.apply(variables, x)
