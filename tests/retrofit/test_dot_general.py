import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from flax import nnx
from flax_models import assert_trees_close, loss, mesh_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, compiled_text

import jax_ub as ub
from jax_ub.errors import ShapeContractError, UnknownNameError, UnsupportedOverlapError
from jax_ub.flax import Linear

DENSE = (((2,), (0,)), ((), ()))


def test_it_is_hashable_and_its_aliases_are_equal():
    assert ub.dot_general("ag") == ub.dot_general("column")
    assert hash(ub.dot_general("rs")) == hash(ub.dot_general("row"))
    assert ub.dot_general("row") != ub.dot_general("row", method="xla")


@covering(
    layer=[("row", "explicit"), ("column", "auto"), ("row", "auto")],
    make=["linen", "nnx"],
)
def test_a_layer_of_flax_is_overlapped(layer, make):
    kind, types = layer
    x, call = normal(0, (4, 8, 16)), ub.dot_general(kind)
    model, plain = (
        nnx.Linear(16, 32, rngs=nnx.Rngs(0), dot_general=function)
        for function in (call, lax.dot_general)
    )
    with jax.set_mesh(mesh_of(2, 2, types)):
        if make == "linen":
            # Initialized with one token, which plain jax.lax multiplies.
            model = nn.Dense(32, dot_general=call)
            variables = model.init(jax.random.key(0), jnp.ones((1, 1, 16)))
            model = model.bind(variables)
            plain = nn.Dense(32).bind(jax.tree.map(np.asarray, variables))
        program = jax.jit(jax.value_and_grad(lambda x: loss(model, x)))
        text = compiled_text(program, x)
        value, gradient = program(x)
    fused = {"column": "all_gather_matmul", "row": "matmul_reduce_scatter"}
    assert calls(text)[fused[kind]] >= 1
    expected = jax.value_and_grad(lambda x: loss(plain, x))(x)
    assert_trees_close((value, gradient), expected, rtol=1e-4)


def test_inside_shard_map_it_takes_shards():
    x, w = normal(0, (4, 8, 16)), normal(1, (16, 32))
    y = jax.jit(
        jax.shard_map(
            lambda x, w: ub.dot_general("column")(x, w, DENSE),
            mesh=mesh_of(2, 2),
            in_specs=(P("dp", "tp"), P(None, "tp")),
            out_specs=P("dp", None, "tp"),
        )
    )(x, w)
    assert_trees_close(y, x @ w)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_several_dimensions_are_contracted_as_one(types):
    x, w = normal(0, (4, 8, 2, 8)), normal(1, (2, 8, 4, 8))
    dims = (((2, 3), (0, 1)), ((), ()))
    with jax.set_mesh(mesh_of(1, 2, types)):
        if types == "explicit":
            w = jax.device_put(w, P(None, None, "tp"))
        program = jax.jit(lambda x, w: ub.dot_general("column")(x, w, dims))
        assert calls(compiled_text(program, x, w)) == {"all_gather_matmul": 1}
        y = program(x, w)
    assert_trees_close(y, lax.dot_general(x, w, dims))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("column", P(None, None, None, "tp")), ("row", P(None, "tp", None, None))],
)
def test_any_of_several_dimensions_may_be_sharded_on_an_explicit_mesh(kind, spec):
    x, w = normal(0, (4, 8, 2, 8)), normal(1, (2, 8, 4, 8))

    def value_and_gradients(product):
        def loss(x, w):
            y = product(x, w, (((2, 3), (0, 1)), ((), ())))
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    expected = value_and_gradients(lax.dot_general)(x, w)
    with jax.set_mesh(mesh_of(1, 2, "explicit")):
        sharded = (
            jax.device_put(x, P("dp", None, None, "tp")),
            jax.device_put(w, spec),
        )
        found = value_and_gradients(ub.dot_general(kind))(*sharded)
    for gradient, operand in zip(found[1], sharded, strict=True):
        assert gradient.sharding == operand.sharding
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_head_per_rank_is_sharded_along_the_axis_of_heads():
    x, w = normal(0, (4, 8, 16)), normal(1, (16, 1, 8))
    dims = (((2,), (0,)), ((), ()))
    with jax.set_mesh(mesh_of(2, 1, "explicit")):
        y = jax.jit(lambda x, w: ub.dot_general("column")(x, w, dims))(x, w)
        layer = Linear(16, (1, 8), parallel="column", rngs=nnx.Rngs(0))
        of_layer = jax.eval_shape(layer, x)
    assert y.sharding.spec == of_layer.sharding.spec == P("dp", None, "tp", None)
    assert_trees_close(y, lax.dot_general(x, w, dims))


def test_fewer_heads_than_ranks_need_automatic_axes():
    x, w = normal(0, (4, 8, 16)), normal(1, (16, 2, 8))
    dims = (((2,), (0,)), ((), ()))
    multiply = jax.jit(lambda x, w: ub.dot_general("column")(x, w, dims))
    with jax.set_mesh(mesh_of(1, 4)):
        assert_trees_close(multiply(x, w), lax.dot_general(x, w, dims))
    text = "the kernel has 2 out features, which do not divide into the 4 ranks of"
    with (
        jax.set_mesh(mesh_of(1, 4, "explicit")),
        pytest.raises(ShapeContractError, match=text),
    ):
        multiply(x, w)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_mismatched_dimensions_are_rejected(kind):
    x, w = jnp.ones((2, 8, 4, 8)), jnp.ones((8, 4, 16))
    text = "x (2, 8, 4, 8) has features [4, 8], but the kernel (8, 4, 16) takes [8, 4]"
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(ShapeContractError, match=re.escape(text)),
    ):
        ub.dot_general(kind)(x, w, (((2, 3), (0, 1)), ((), ())))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_result_is_rounded_once_to_the_dtype_asked_for(kind):
    x, w = (normal(i, s, "bfloat16") for i, s in enumerate([(2, 8, 16), (16, 32)]))
    options = {"preferred_element_type": jnp.float32, "precision": "highest"}
    with jax.set_mesh(mesh_of(1, 2)):
        y = jax.jit(lambda x, w: ub.dot_general(kind)(x, w, DENSE, **options))(x, w)
    assert y.dtype == jnp.float32
    assert_trees_close(y, lax.dot_general(x, w, DENSE, **options))


@covering(types=["auto", "explicit"], kind=["column", "row"])
def test_a_kernel_stored_as_out_in_is_read_in_place(kind, types):
    call, dims = ub.dot_general(kind), (((2,), (1,)), ((), ()))
    x, w = normal(0, (4, 8, 16)), normal(1, (32, 16))

    def loss(product, x, w):
        return jnp.sum(jnp.sin(product(x, w, dims)))

    expected = jax.grad(lambda x, w: loss(lax.dot_general, x, w), (0, 1))(x, w)
    with jax.set_mesh(mesh_of(2, 2, types)):
        x = jax.device_put(x, P("dp"))
        w = jax.device_put(w, P("tp") if kind == "column" else P(None, "tp"))
        program = jax.jit(jax.grad(lambda x, w: loss(call, x, w), (0, 1)))
        text = compiled_text(program, x, w)
        gradients = program(x, w)
    assert calls(text)["wgrad"] == 1
    assert " transpose(" not in text
    assert gradients[1].shape == w.shape
    assert_trees_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_several_dimensions_of_a_kernel_stored_as_out_in():
    x, w = normal(0, (4, 8, 2, 8)), normal(1, (4, 8, 2, 8))
    dims = (((2, 3), (2, 3)), ((), ()))
    with jax.set_mesh(mesh_of(1, 2)):
        program = jax.jit(lambda x, w: ub.dot_general("column")(x, w, dims))
        assert calls(compiled_text(program, x, w)) == {"all_gather_matmul": 1}
        assert_trees_close(program(x, w), lax.dot_general(x, w, dims))


@pytest.mark.parametrize("dims", [((3, 2), (1, 0)), ((3, 2), (2, 1))])
def test_the_order_of_the_contracted_dimensions_is_arbitrary(dims):
    # jax.numpy.einsum passes the contracted dimensions in reverse order.
    x = normal(0, (4, 8, 2, 8))
    w = normal(1, (2, 8, 16) if 0 in dims[1] else (16, 2, 8))
    dims = (dims, ((), ()))
    with jax.set_mesh(mesh_of(1, 2)):
        program = jax.jit(lambda x, w: ub.dot_general("row")(x, w, dims))
        assert calls(compiled_text(program, x, w)) == {"matmul_reduce_scatter": 1}
        assert_trees_close(program(x, w), lax.dot_general(x, w, dims))


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_the_result_has_the_given_out_sharding(types):
    x, w = normal(0, (4, 8, 16)), normal(1, (16, 32))
    with jax.set_mesh(mesh_of(2, 2, types)):
        call = ub.dot_general("column")
        y = jax.jit(lambda x, w: call(x, w, DENSE, out_sharding=P("dp", "tp", None)))(
            x, w
        )
    assert tuple(filter(None, y.sharding.spec)) == ("dp", "tp")
    assert y.sharding.shard_shape(y.shape) == (2, 4, 32)


@pytest.mark.parametrize(
    ("x", "w", "dims", "reason"),
    [
        ((4, 16, 8), (16, 32), (((1,), (0,)), ((), ())), "are not contracted"),
        ((4, 8, 16), (4, 16, 32), (((2,), (1,)), ((0,), (0,))), "are not contracted"),
        ((4, 1, 16), (16, 32), DENSE, "has 1 tokens (axis -2)"),
        ((0, 8, 16), (16, 32), DENSE, "x (0, 8, 16) is empty"),
    ],
)
def test_calls_that_cannot_be_overlapped_fall_back_to_jax(x, w, dims, reason):
    x, w = normal(0, x), normal(1, w)
    with jax.set_mesh(mesh_of(1, 2)):
        program = jax.jit(lambda x, w: ub.dot_general("row")(x, w, dims))
        assert not calls(compiled_text(program, x, w))
        y = program(x, w)
    assert_trees_close(y, lax.dot_general(x, w, dims))
    assert reason in ub.fallbacks()[-1].reason


def test_an_export_of_symbolic_batch_size_falls_back_to_jax():
    x, model = normal(0, (4, 8, 16)), nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    expected = model(x)
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 8, 16), x.dtype)
    mesh = mesh_of(1, 2)
    with jax.set_mesh(mesh):
        model.dot_general = ub.dot_general("column")
        exported = jax.export.export(jax.jit(lambda x: model(x)))(shape)
        reason = ub.fallbacks()[-1].reason
        y = jax.jit(exported.call)(jax.device_put(x, NamedSharding(mesh, P())))
    assert_trees_close(y, expected)
    assert reason.startswith("x (batch, 8, 16) is exported with symbolic sizes")
    assert reason.endswith("export it once for each size")


def test_a_misspelled_precision_is_rejected():
    x, w = jnp.ones((4, 8, 16)), jnp.ones((16, 32))
    text = "(parallel='column'): precision = 'hgh' is not a precision. Pass a jax.lax."
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(ShapeContractError, match=re.escape(text)),
    ):
        ub.dot_general("column")(x, w, DENSE, precision="hgh")


def test_a_result_of_another_dtype_falls_back_to_jax():
    x, w = normal(0, (4, 8, 16)), normal(1, (16, 32))
    asked = {"preferred_element_type": "float64"}
    with jax.enable_x64(True), jax.set_mesh(mesh_of(1, 2)):
        y = jax.jit(lambda x, w: ub.dot_general("row")(x, w, DENSE, **asked))(x, w)
    assert y.dtype == "float64"
    assert ub.fallbacks()[-1].reason == "the result would have the dtype float64"


def test_integers_fall_back_to_jax():
    x, w = jnp.ones((4, 8, 16), jnp.int8), jnp.ones((16, 32), jnp.int8)
    with jax.set_mesh(mesh_of(1, 2)):
        y = ub.dot_general("column")(x, w, DENSE)
    assert y.dtype == jnp.int8


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"kind": "colum"},
            UnknownNameError,
            "dot_general: kind = 'colum' is not a way to shard a kernel. Did you mean "
            "'column'? Known: 'column', 'row', 'ag', 'rs'.",
        ),
        ({"kind": None}, UnknownNameError, "kind = None is not a way to shard"),
        (
            {"kind": "row", "method": "pipelin"},
            UnknownNameError,
            "method = 'pipelin' is not a method. Did you mean 'pipeline'?",
        ),
    ],
)
def test_an_unknown_kind_or_method_is_rejected(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ub.dot_general(**options)


def test_the_error_without_a_mesh_lists_the_ways_to_pass_one():
    with pytest.raises(ShapeContractError, match=r"no mesh is known here.*set_mesh"):
        ub.dot_general("row")(jnp.ones((2, 8, 16)), jnp.ones((16, 32)), DENSE)


def test_an_explicit_method_does_not_fall_back():
    call = ub.dot_general("row", method="pipeline")
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(ShapeContractError, match=r"1 tokens .* do not divide into 2"),
    ):
        call(jnp.ones((2, 1, 16)), jnp.ones((16, 32)), DENSE)


def test_shards_that_cannot_be_overlapped_are_rejected():
    text = (
        "x (4, 8, 16) and kernel (8, 32) are not contracted over the last dimensions "
        "of x and the first or the last of the kernel, and inside shard_map over 'tp' "
        "nothing else would communicate. Use jax.lax.dot_general"
    )
    dims = (((1,), (0,)), ((), ()))
    with pytest.raises(UnsupportedOverlapError, match=re.escape(text)):
        jax.shard_map(
            lambda x, w: ub.dot_general("row")(x, w, dims),
            mesh=mesh_of(1, 2),
            in_specs=(P(), P("tp")),
            out_specs=P(),
        )(jnp.ones((4, 8, 16)), jnp.ones((16, 32)))


def test_a_whole_kernel_for_sharded_features_is_rejected():
    with pytest.raises(
        ShapeContractError, match=r"in_specs P\(axis_name, None\) for w"
    ):
        jax.shard_map(
            lambda x, w: ub.dot_general("row")(x, w, DENSE),
            mesh=mesh_of(1, 2),
            in_specs=(P(None, None, "tp"), P()),
            out_specs=P(None, "tp"),
        )(jnp.ones((4, 8, 16)), jnp.ones((16, 32)))


@pytest.mark.parametrize("mesh", [4, jax.devices, "tp"], ids=["size", "list", "axis"])
def test_other_values_than_meshes_are_rejected(mesh):
    mesh = mesh() if callable(mesh) else mesh
    text = rf"linear\(parallel='column'\): mesh = .* {type(mesh).__name__}. Pass a jax"
    with pytest.raises(ShapeContractError, match=text):
        ub.dot_general("column", mesh=mesh)
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
    with pytest.raises(ShapeContractError, match="Pass a jax.sharding.Mesh"):
        ub.overlap(model, {r".*": "column"}, mesh=mesh)
