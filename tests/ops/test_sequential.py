"""A list of operations, called one after another."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal
from ops_on_ranks import value_and_gradients
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops


def block():
    """Returns a residual MLP block with every kind of operation."""
    residual = ops.MakeExtraOutput(in_place=True)
    return ops.Sequential(
        residual.with_extra_output_channel(0, "residual", output_to_caller=False),
        ops.LayerNorm(8),
        ops.Linear(8, 16, tensor_parallel_mode="column", sequence_parallel=True),
        ops.GELU(),
        ops.Linear(16, 8, tensor_parallel_mode="row", sequence_parallel=True),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(in_place=True).with_extra_input_channel(0, "residual"),
    )


def normal_of(seq):
    """Returns normally distributed parameters, small enough to keep sums small."""
    shapes = jax.eval_shape(seq.init, jax.random.key(0))
    return jax.tree.map(lambda shape: normal(0, shape.shape) / 4, shapes)


def plain_block(params, x):
    _, norm, up, _, down, _, _ = params
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    normalized = (x - mean) / jnp.sqrt(variance + 1e-5)
    y = normalized * norm["scale"] + norm["bias"]
    y = jax.nn.gelu(y @ up["kernel"] + up["bias"])
    return x + 0.5 * (y @ down["kernel"] + down["bias"])


@covering(num_ranks=[2, 4, *nightly(1)], check_vma=[True, False])
def test_block_and_gradients_equal_plain_jax(num_ranks, check_vma):
    seq = block()
    params = normal_of(seq)
    x = normal(1, (3, 8, 8))
    specs = (seq.specs(), P(None, "tp"))
    run = on_ranks(seq, tp_mesh(num_ranks), specs, P(None, "tp"), check_vma=check_vma)

    def step(function):
        return value_and_gradients(lambda *v: jnp.sin(function(*v)), 1.0)(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        step(run),
        step(plain_block),
    )


def test_sequential_is_a_list():
    a, b, c = ops.GELU(), ops.ReLU(), ops.SiLU()
    seq = ops.Sequential(a)
    assert seq.append(c).insert(1, b) is seq
    assert list(seq) == [a, b, c]
    assert len(seq) == 3
    assert seq[1] == b
    assert seq[1:] == ops.Sequential(b, c)
    assert seq + [a] == ops.Sequential(a, b, c, a)
    assert seq + ops.Sequential(a) == ops.Sequential(a, b, c, a)
    assert seq.pop() == c
    assert seq.pop(0) == a
    seq += [c]
    seq.extend([a, b])
    seq[0] = c
    del seq[1]
    assert list(seq) == [c, a, b]
    assert seq != [c, a, b]
    assert hash(seq) == hash(ops.Sequential(c, a, b))
    with pytest.raises(
        ub.errors.ShapeContractError, match="type Bound, not an operation"
    ):
        seq.append(type("Bound", (), {})())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda seq: seq.insert("0", ops.ReLU()), "Sequential.insert"),
        (lambda seq: seq.pop(1.5), "Sequential.pop"),
        (lambda seq: seq["0"], "Sequential"),
        (lambda seq: seq.__setitem__(None, ops.ReLU()), "Sequential"),
        (lambda seq: seq.__delitem__("0"), "Sequential"),
    ],
)
def test_an_index_that_is_no_integer_is_rejected(change, where):
    seq = ops.Sequential(ops.GELU())
    text = rf"^{where}: index = .* is not an integer\. Pass the index of an operation"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        change(seq)
    assert list(seq) == [ops.GELU()]


def test_a_failed_extend_adds_nothing():
    seq = ops.Sequential(ops.GELU())
    for found, text in (
        ([ops.ReLU(), 3], "Sequential: entry 1 is of type int, not an operation"),
        (3, "Sequential: ops is of type int. Pass a list"),
    ):
        with pytest.raises(ub.errors.ShapeContractError, match=text):
            seq.extend(found)
        with pytest.raises(ub.errors.ShapeContractError, match=text):
            seq + found
    assert list(seq) == [ops.GELU()]


def test_a_sequential_does_not_contain_itself():
    seq = ops.Sequential(ops.GELU())
    outer = ops.Sequential(seq, seq)
    text = "Sequential: an entry is, or contains, the Sequential to which it is added"
    for add in (
        lambda: seq.append(seq),
        lambda: seq.insert(0, outer),
        lambda: seq.extend([ops.ReLU(), outer]),
        lambda: seq.__setitem__(0, ops.Sequential(outer)),
    ):
        with pytest.raises(ub.errors.ShapeContractError, match=text):
            add()
    assert list(seq) == [ops.GELU()]
    assert list(seq.append(ops.Sequential(*seq)).extend(seq))[2:] == list(seq)[:2]


def test_repr_is_the_constructor_call():
    seq = ops.Sequential(ops.Linear(4, 8, use_bias=False), ops.GELU())
    assert repr(seq) == (
        "Sequential(\n"
        "  (0): Linear(in_features=4, out_features=8, use_bias=False)\n"
        "  (1): GELU()\n)"
    )
    assert repr(ops.Sequential()) == "Sequential()"


def test_a_changed_list_is_retraced():
    seq, x = ops.Sequential(ops.ConstantScale(2.0)), jnp.ones(3)
    run = jax.jit(lambda seq, params, x: seq(params, x), static_argnums=0)
    np.testing.assert_array_equal(run(seq, ({},), x), 2 * x)
    seq.append(ops.ConstantScale(5.0))
    np.testing.assert_array_equal(run(seq, ({}, {}), x), 10 * x)


def test_sequentials_nest():
    inner = ops.Sequential(ops.Linear(4, 8), ops.ReLU())
    seq = ops.Sequential(inner, ops.Linear(8, 4))
    params, x = normal_of(seq), normal(1, (3, 4))
    assert jax.tree.structure(params) == jax.tree.structure(seq.specs())
    (up, _), down = params
    expected = jax.nn.relu(x @ up["kernel"] + up["bias"]) @ down["kernel"]
    np.testing.assert_allclose(seq(params, x), expected + down["bias"], rtol=1e-5)
    with pytest.raises(
        ub.errors.ShapeContractError, match="Sequential: params is of type dict"
    ):
        seq(({}, down), x)


ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("operation", "params", "inputs", "text"),
    [
        (ops.Linear(4, 4), None, (ONES,), "Linear: params is of type NoneType, but "),
        (ops.GELU(), None, (ONES,), "GELU: params is of type NoneType, but the para"),
        (
            ops.Bias(4),
            {1: ONES[0], "bias": ONES[0]},
            (ONES,),
            "Bias: params has the key 1, which is not the name of a parameter. Pass wh",
        ),
        (
            ops.Linear(4, 4),
            {"kernel": None, "bias": ONES[0]},
            (ONES,),
            "Linear: kernel is of type NoneType, but the op takes an array. Pass one.",
        ),
        (
            ops.LayerNorm(4),
            {"scale": ONES[0], "bias": ONES[0, :1]},
            (ONES,),
            "LayerNorm: bias has shape (1,), but here it is the scale's shape, (4,).",
        ),
        (ops.GELU(), {}, (None,), "OperationFuser: x is of type NoneType, but the op "),
        (
            ops.AddExtraInput(),
            {},
            (ONES, None),
            "OperationFuser: extra input 0 is of type NoneType, but the op takes an ar",
        ),
    ],
)
def test_operands_that_are_no_arrays_are_rejected(operation, params, inputs, text):
    with pytest.raises(ub.errors.ShapeContractError, match=re.escape(text)):
        ops.Sequential(operation)((params,), *inputs)


def test_an_empty_sequential_returns_its_input():
    x = jnp.ones(3)
    assert ops.Sequential()((), x) is x


def test_parameters_equal_those_of_flax():
    from flax import nnx

    seq = ops.Sequential(ops.Linear(4, 8), ops.LayerNorm(8, eps=1e-6))
    linear, norm = (
        nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(8, rngs=nnx.Rngs(1)),
    )
    params = tuple(nnx.to_pure_dict(nnx.state(layer)) for layer in (linear, norm))
    assert jax.tree.structure(params) == jax.tree.structure(seq.specs())
    x = normal(1, (3, 4))
    np.testing.assert_allclose(seq(params, x), norm(linear(x)), atol=1e-5)


def test_init_depends_only_on_the_key_and_the_index():
    seq = ops.Sequential(ops.Linear(4, 4), ops.Linear(4, 4))
    first, second = seq.init(jax.random.key(0))
    assert not np.array_equal(first["kernel"], second["kernel"])
    again, _ = (seq + [ops.Bias(4)])[:2].init(jax.random.key(0))
    np.testing.assert_array_equal(first["kernel"], again["kernel"])


def transformed(seq):
    """Returns, by name, the losses of two consecutive calls of a block."""

    def loss(apply):
        def run(params, x):
            carried = jax.lax.scan(lambda x, _: (apply(params, x), None), x, length=2)[
                0
            ]
            return jnp.sum(jnp.sin(carried))

        return run

    return {
        "plain": loss(seq),
        "remat": loss(jax.checkpoint(seq)),
    }


def test_remat_scan_and_vmap_give_the_same_gradients():
    seq, mesh = block(), tp_mesh(2)
    params, x = normal_of(seq), normal(1, (3, 8, 8))

    def gradients(params, x):
        ways = transformed(seq)
        ways["vmap"] = lambda p, x: jnp.sum(
            jnp.sin(jax.vmap(lambda row: seq(p, seq(p, row)))(x))
        )
        return {name: jax.grad(way, (0, 1))(params, x) for name, way in ways.items()}

    specs = (seq.specs(), P(None, "tp"))
    names = ("plain", "remat", "vmap")
    found = on_ranks(gradients, mesh, specs, dict.fromkeys(names, specs))(params, x)
    plain = transformed(plain_block)["plain"]
    expected = jax.jit(jax.grad(plain, (0, 1)))(params, x)
    for name in names:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
            found[name],
            expected,
        )


def test_gradients_have_the_explicit_shardings_of_their_operands():
    """Outside `jax.shard_map`, operations without a GEMM run as plain JAX."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    residual = ops.MakeExtraOutput().with_extra_output_channel(0, "x", False)
    add = ops.AddExtraInput().with_extra_input_channel(0, "x")
    seq = ops.Sequential(residual, ops.LayerNorm(8), ops.Bias(8), ops.GELU(), add)
    params, x = normal_of(seq), normal(1, (4, 2, 8))
    step = lambda p, x: jax.grad(lambda *v: jnp.sum(jnp.sin(seq(*v))), (0, 1))(p, x)  # noqa: E731
    expected = jax.jit(step)(params, x)
    for spec in (P("a"), P(None, None, "b"), P("a", "b")):
        with jax.set_mesh(mesh):
            operands = params, jax.device_put(x, NamedSharding(mesh, spec))
            found = jax.jit(step)(*operands)
        specs = [
            jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)
            for tree in (found, operands)
        ]
        assert specs[0] == specs[1]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), b, atol=1e-5),
            found,
            expected,
        )


def test_remat_saves_memory():
    seq = ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))
    params, x = normal_of(seq), jnp.ones((256, 8))

    def saved(**options):
        apply = jax.checkpoint(seq, **options) if options else seq
        _, transposed = jax.vjp(lambda p: apply(p, x), params)
        return sum(leaf.size for leaf in jax.tree.leaves(transposed))

    nothing = jax.checkpoint_policies.nothing_saveable
    assert saved(policy=nothing) < saved()


def test_forward_mode_is_rejected():
    seq = ops.Sequential(ops.Linear(4, 4))
    params, x = normal_of(seq), jnp.ones((2, 4))
    loss = lambda x: jnp.sum(seq(params, x) ** 2)  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))


@pytest.mark.parametrize(
    "op",
    [
        ops.AllGather(method="xla"),
        ops.AllReduce(method="xla"),
        ops.BasicLinear(
            4, 8, tensor_parallel_mode="column", sequence_parallel=True, method="xla"
        ),
    ],
)
def test_an_axis_of_vmap_that_hides_the_mesh_axis_is_rejected(op):
    """The backward would communicate over the mesh axis, the forward over the other."""
    seq = ops.Sequential(op)
    params = jax.tree.map(lambda a: a[..., :4], seq.init(jax.random.key(0)))
    mapped = jax.vmap(lambda x: seq(params, x), axis_name="tp")
    gradient = jax.grad(lambda x: jnp.sum(mapped(x)))
    run = on_ranks(gradient, tp_mesh(2), P("tp"), P("tp"), check_vma=False)
    with pytest.raises(ub.errors.ShapeContractError, match="hides the mesh axis"):
        run(jnp.ones((4, 4, 4)))


OVER_RANKS = [
    ops.AllGather(),
    ops.AllReduce(),
    ops.ReduceScatter(),
    ops.BasicLinear(4, 8, tensor_parallel_mode="column", sequence_parallel=True),
    ops.BasicLinear(
        *(4, 8),
        tensor_parallel_mode="column",
        sequence_parallel=True,
        userbuffers_options={"comm_name": "qkv"},
    ),
]


@pytest.mark.parametrize("op", OVER_RANKS)
def test_ranks_may_be_an_axis_of_vmap_for_plain_jax(op, monkeypatch):
    seq = ops.Sequential(op)
    params = jax.tree.map(lambda a: a[..., :4], seq.init(jax.random.key(0)))
    run, x = lambda x: seq(params, x), jnp.ones((2, 4, 4))
    text = "'tp' is not a manual mesh axis, but an axis of jax.vmap.* or pass method="
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        jax.vmap(run, axis_name="tp")(x)
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    loss = lambda x: jnp.sum(run(x))  # noqa: E731
    assert jax.vmap(jax.grad(loss), axis_name="tp")(x).shape == x.shape
    text = r"operation 0 .* Differentiate inside the jax.vmap instead: jax.vmap\(jax.gr"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        jax.grad(lambda x: jnp.sum(jax.vmap(run, axis_name="tp")(x)))(x)


def test_dropout_and_quantize_accept_an_axis_of_vmap():
    x = jnp.stack([jnp.ones((8, 8)), jnp.full((8, 8), 300.0)])
    dropout = ops.Sequential(ops.Dropout(0.5, axis_name="tp"))
    run = lambda x: dropout(({},), x, key=jax.random.key(0))  # noqa: E731
    found = jax.vmap(run, axis_name="tp")(x)
    assert not np.array_equal(found[0] == 0, found[1] == 0)
    quantize = ops.Sequential(ops.Quantize(axis_name="tp"))
    found = jax.vmap(lambda x: quantize(({},), x), axis_name="tp")(x)
    np.testing.assert_allclose(found, x, rtol=0.1)
    assert np.all(found[0] != 1)  # rounded with the scale of both examples


def test_runs_without_jit():
    seq = ops.Sequential(ops.Linear(4, 4), ops.ReLU())
    params, x = normal_of(seq), jnp.ones((2, 4))
    gradient = lambda p, x: jax.grad(lambda p: jnp.sum(seq(p, x)))(p)  # noqa: E731
    run = jax.shard_map(gradient, mesh=tp_mesh(2), in_specs=P(), out_specs=P())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        run(params, x),
        jax.jit(gradient)(params, x),
    )
