import inspect
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import (
    Block,
    assert_learns_as,
    assert_trees_close,
    loss,
    loss_and_gradients,
    mesh_of,
    plain_block,
    random_model,
)
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal, small_integers
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub._src.primitives.call import Call
from jax_ub.flax import Linear, TransformerLayer

PARALLEL = ("column", "row", None)


def block(rngs=None, **options):
    if rngs is None:
        return random_model(lambda: block(nnx.Rngs(0), **options))
    return Block(
        lambda rngs: Linear(16, 32, parallel="column", rngs=rngs, **options),
        lambda rngs: Linear(32, 16, parallel="row", rngs=rngs, **options),
        rngs,
    )


@covering(parallel=PARALLEL, use_bias=[True, False])
def test_parameters_equal_those_of_flax(parallel, use_bias):
    ours = Linear(16, 32, parallel=parallel, use_bias=use_bias, rngs=nnx.Rngs(0))
    flax = nnx.Linear(16, 32, use_bias=use_bias, rngs=nnx.Rngs(0))
    ours, flax = (nnx.to_pure_dict(nnx.state(model)) for model in (ours, flax))
    assert_equal(ours, flax)


@covering(
    layer=[
        ("column", (4, 2), (4, 8)),
        ("row", (4, 8), (4, 2)),
        *nightly(("column", 16, (4, 8)), ("row", (4, 8), 16)),
    ],
    types=["auto", "explicit"],
)
def test_several_dimensions_equal_those_of_linear_general(layer, types):
    parallel, ins, outs = layer
    axis = (-2, -1) if isinstance(ins, tuple) else -1
    flax = nnx.LinearGeneral(ins, outs, axis=axis, rngs=nnx.Rngs(0))
    x = normal(0, (4, 8, *flax.in_features))
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = Linear(ins, outs, parallel=parallel, rngs=nnx.Rngs(0))
        trees = (nnx.to_pure_dict(nnx.state(each)) for each in (model, flax))
        assert_equal(*trees)
        value, gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, x)
    expected = loss_and_gradients(flax, x, argnums=(0, 1))
    assert_trees_close(value, expected[0], rtol=1e-4)
    assert_trees_close(nnx.to_pure_dict(gradients[0]), nnx.to_pure_dict(expected[1][0]))
    assert_trees_close(gradients[1], expected[1][1])


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_residual_is_added_in_the_dtype_that_holds_both(parallel):
    x, residual = normal(0, (4, 8, 16)), normal(1, (4, 8, 32))
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(2, 2)):
        model = Linear(16, 32, parallel=parallel, rngs=nnx.Rngs(0))
        run = nnx.jit(lambda model, x, residual: model(x, residual=residual))
        y = run(model, x, residual)
        narrow = run(model, x, residual.astype(jnp.bfloat16))
    assert_trees_close(y, flax(x) + residual)
    assert narrow.dtype == jnp.float32


def test_checkpoints_swap_both_ways():
    ours, flax = block(), plain_block(nnx.Rngs(1))
    x = small_integers(0, (4, 8, 16))
    expected = plain_block()(x)
    nnx.update(flax, nnx.state(ours))
    assert_equal(flax(x), expected)
    nnx.update(ours, nnx.state(plain_block(nnx.Rngs(1))))
    with jax.set_mesh(mesh_of(1, 2)):
        y = nnx.jit(lambda model, x: model(x))(ours, x)
    assert_trees_close(y, plain_block(nnx.Rngs(1))(x))


@covering(
    mesh=[(1, 1, "auto"), (1, 4, "explicit"), (2, 2, "auto"), (2, 4, "explicit")],
    # 3 does not divide into the data axis.
    shape=[(4, 8, 16), (8, 16), (2, 3, 8, 16), (3, 8, 16)],
    sequence_parallel=[True, False],
)
def test_values_and_gradients_equal_those_of_flax(mesh, shape, sequence_parallel):
    x = normal(0, shape)
    with jax.set_mesh(mesh_of(*mesh)):
        model = block(sequence_parallel=sequence_parallel)
        value, gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, x)
    expected = loss_and_gradients(plain_block(), x, argnums=(0, 1))
    assert_trees_close(value, expected[0], rtol=1e-4)
    assert_trees_close(nnx.to_pure_dict(gradients[0]), nnx.to_pure_dict(expected[1][0]))
    assert_trees_close(gradients[1], expected[1][1])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_plain_layer_does_not_move_tokens(sequence_parallel):
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        model = Linear(16, 32, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0))
        call = jax.jit(lambda x: model(x))
        y = call(x)
        tokens = ("tp",) if sequence_parallel else ()
        assert tuple(filter(None, y.sharding.spec)) == ("dp", *tokens)
        assert not collectives(compiled_text(call, x))
        gradients = nnx.jit(nnx.grad(loss))(model, x)
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    assert_trees_close(y, flax(x))
    assert_trees_close(
        nnx.to_pure_dict(gradients), nnx.to_pure_dict(loss_and_gradients(flax, x)[1])
    )


@covering(parallel=PARALLEL, mesh=[(1, 2), (2, 1), (1, 1)])
def test_explicit_result_types_have_axes_of_one_rank(parallel, mesh):
    layout = {"column": P("dp", None, "tp")}.get(parallel, P("dp", "tp", None))
    with jax.set_mesh(mesh_of(*mesh, "explicit")):
        y = jax.eval_shape(
            lambda x: Linear(16, 32, parallel=parallel, rngs=nnx.Rngs(0))(x),
            jax.ShapeDtypeStruct((4, 8, 16), "float32"),
        )
    assert y.sharding.spec == layout


@pytest.mark.parametrize(
    "axes", [("dp", "one"), *nightly("dp", ("one", "dp"), ("one",))]
)
def test_explicit_result_types_have_the_axes_of_x(axes):
    mesh = jax.make_mesh((1, 2 if "dp" in axes else 1, 2), ("one", "dp", "tp"))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, (4, 8, 16)), P(axes, "tp", None))

        def layers(x):
            options = {"rngs": nnx.Rngs(0)}
            up = Linear(16, 32, parallel="column", **options)
            down = Linear(32, 16, parallel="row", **options)
            return x + down(up(x)), TransformerLayer(16, 32, 4, **options)(x)

        for y in jax.eval_shape(layers, x):
            assert y.sharding == jax.typeof(x).sharding


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_an_explicit_mesh_may_be_an_argument(parallel):
    x, mesh = normal(0, (4, 8, 16)), mesh_of(2, 2, "explicit")
    model, plain = (
        Linear(16, 32, rngs=nnx.Rngs(0), **options)
        for options in ({"parallel": parallel, "mesh": mesh}, {})
    )
    assert_trees_close(model(x), plain(x))
    assert_learns_as(plain, x, loss_and_gradients(model, x))


def test_a_plain_layer_needs_no_mesh():
    x = normal(0, (8, 16))
    model, flax = (kind(16, 32, rngs=nnx.Rngs(0)) for kind in (Linear, nnx.Linear))
    assert_trees_close(model(x), flax(x))
    assert_trees_close(model(x[0]), flax(x[0]))


def test_a_plain_layer_takes_any_number_of_tokens_and_any_mesh():
    x = normal(0, (3, 16))
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    for options in ({}, {"axis_name": "model"}):
        model = Linear(16, 32, rngs=nnx.Rngs(0), **options)
        with jax.set_mesh(mesh_of(2, 2)):
            y = model(x)
        assert_trees_close(y, flax(x))


def test_a_pair_of_layers_compiles_to_two_calls_and_no_other_communication():
    x = jax.device_put(normal(0, (4, 8, 16)))
    with jax.set_mesh(mesh_of(2, 2)):
        model = block()
        x = jax.device_put(x, P("dp", "tp"))
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = compiled_text(program, state, x)
    assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    assert not collectives(text)


def test_inside_shard_map_the_layers_work_on_shards():
    mesh = mesh_of(2, 2)
    model = block()
    graph, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    assert specs.up.kernel.get_value() == P(None, "tp")
    assert specs.down.kernel.get_value() == P("tp", None)

    @jax.jit
    def run(state, x):
        return jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh,
            in_specs=(specs, P("dp", "tp")),
            out_specs=P("dp", "tp"),
        )(state, x)

    x = normal(0, (4, 8, 16))
    gradients = jax.jit(jax.grad(lambda state, x: jnp.sum(jnp.sin(run(state, x)))))(
        state, x
    )
    assert_trees_close(run(state, x), plain_block()(x))
    expected = loss_and_gradients(plain_block(), x)[1]
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))


def test_inside_a_shard_map_over_data_axes_only_the_layer_takes_the_rest():
    model = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        y = jax.jit(
            jax.shard_map(
                lambda state, x: nnx.merge(graph, state)(x),
                in_specs=(P(), P("dp")),
                out_specs=P("dp"),
                axis_names={"dp"},
            )
        )(state, x)
    assert_trees_close(y, nnx.Linear(16, 32, rngs=nnx.Rngs(0))(x))


@pytest.mark.parametrize("parallel", PARALLEL)
def test_gradients_go_through_a_shard_map_over_data_axes_only(parallel):
    model = Linear(16, 32, parallel=parallel, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        apply = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            in_specs=(P(), P("dp")),
            out_specs=P("dp"),
            axis_names={"dp"},
            check_vma=False,  # jax 0.10.2 cannot lower the gradient otherwise
        )
        gradients = jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(apply(*given)))))(
            state, x
        )
    expected = loss_and_gradients(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), x)[1]
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))


def test_the_mesh_may_be_an_argument_or_the_kernel_s():
    mesh, x = mesh_of(2, 2), normal(0, (4, 8, 16))
    expected = nnx.Linear(16, 32, rngs=nnx.Rngs(0))(x)
    given = Linear(16, 32, parallel="column", mesh=mesh, rngs=nnx.Rngs(0))
    assert given.kernel.sharding.spec == P(None, "tp")
    assert_trees_close(nnx.jit(lambda model, x: model(x))(given, x), expected)
    with jax.set_mesh(mesh):
        found = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0))
    assert_trees_close(found(x), expected)


@covering(parallel=PARALLEL, shape=[(0, 8, 16), (2, 0, 16), (0, 16)])
def test_empty_inputs_have_empty_results(parallel, shape):
    options = {"parallel": parallel, "rngs": nnx.Rngs(0)}
    x, residual = (normal(0, dims) for dims in (shape, (*shape[:-1], 4, 8)))
    with jax.set_mesh(mesh_of(2, 2)):
        model = Linear(16, (4, 8), **options)
        call = nnx.jit(lambda model, x, residual: model(x, residual=residual))
        y = call(model, x, residual)
        gradients = nnx.jit(nnx.grad(loss))(model, x)
        accumulating = Linear(16, 32, main_grad=True, **options)
        with pytest.raises(ub.errors.ShapeContractError, match="is empty. Leave"):
            accumulating(x)
    assert y.shape == (*shape[:-1], 4, 8)
    assert not np.any(gradients.kernel[...])


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_it_is_called_like_the_layer_of_flax(types):
    ours, flax = (inspect.signature(kind.__call__) for kind in (Linear, nnx.Linear))
    assert list(ours.parameters) == [*flax.parameters, "residual"]
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0))
        run = nnx.jit(lambda model, x: model(x, out_sharding=P("dp", "tp")))
        y = run(model, x)
    assert tuple(filter(None, y.sharding.spec)) == ("dp", "tp")
    assert y.sharding.shard_shape(y.shape) == (2, 4, 32)


def test_an_initializer_may_have_partitioning_metadata_of_flax():
    x = normal(0, (4, 8, 16))
    zeros, lecun = nnx.initializers.zeros_init(), nnx.initializers.lecun_normal()
    inits = {
        "kernel_init": nnx.with_partitioning(lecun, (None, "tp", None)),
        "bias_init": nnx.with_partitioning(zeros, (None, None), note="whole"),
    }
    options = {"parallel": "column", "main_grad": True, "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh_of(2, 2)):
        model = Linear(16, (4, 8), **inits, **options)
        flax = nnx.LinearGeneral(16, (4, 8), **inits, rngs=nnx.Rngs(0))
        for name in ("kernel", "bias"):
            ours, theirs = getattr(model, name), getattr(flax, name)
            assert_equal(ours[...], theirs[...])
            assert ours.sharding == theirs.sharding
            assert ours.get_metadata() == theirs.get_metadata()
        assert model.main_grad.sharding == model.kernel.sharding
        assert_trees_close(model(x), flax(x))
        # An initializer without a sharding gets the layer's.
        noted = nnx.with_metadata(lecun, note="mine")
        model = Linear(16, 32, parallel="column", kernel_init=noted, rngs=nnx.Rngs(0))
    assert model.kernel.note == "mine"
    assert model.kernel.sharding.spec == P(None, "tp")


def test_a_layer_runs_and_differentiates_outside_jit():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        model = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0))
        y, gradients = model(x), nnx.grad(loss)(model, x)
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    assert_trees_close(y, flax(x))
    assert_trees_close(
        nnx.to_pure_dict(gradients), nnx.to_pure_dict(loss_and_gradients(flax, x)[1])
    )


def test_a_layer_computes_in_its_dtype():
    x = normal(0, (4, 8, 16))
    options = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh_of(1, 2)):
        model = Linear(16, 32, parallel="row", **options)
        y = nnx.jit(lambda model, x: model(x))(model, x)
        gradients = nnx.jit(nnx.grad(loss))(model, x)
    assert y.dtype == jnp.bfloat16
    assert model.kernel.dtype == gradients.kernel.dtype == jnp.float32
    expected = nnx.Linear(16, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x)
    assert_trees_close(y, expected, atol=0.05, rtol=0.02)


@covering(parallel=PARALLEL, sequence_parallel=[True, False])
def test_the_sum_is_rounded_once_to_the_dtype_of_the_result(
    parallel, sequence_parallel
):
    x = normal(0, (4, 8, 16))
    options = {
        "dtype": jnp.bfloat16,
        "preferred_element_type": jnp.float32,
    }
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0), **options)
    options |= {"parallel": parallel, "sequence_parallel": sequence_parallel}
    with jax.set_mesh(mesh_of(1, 2)):
        model = Linear(16, 32, rngs=nnx.Rngs(0), **options)
        gradients = nnx.jit(nnx.grad(loss))(model, x)
        y = nnx.jit(lambda model, x: model(x))(model, x)
    assert y.dtype == jnp.float32
    assert_trees_close(y, flax(x))
    expected = nnx.to_pure_dict(loss_and_gradients(flax, x)[1])
    assert_trees_close(nnx.to_pure_dict(gradients), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(("data_axes", "lead"), [((), None), ("dp", "dp")])
def test_data_axes_may_be_chosen(data_axes, lead):
    x, options = normal(0, (4, 8, 16)), {"data_axes": data_axes, "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh_of(2, 2)):
        model = Linear(16, 32, parallel="column", **options)
        y = jax.jit(lambda x: model(x))(x)
    assert y.sharding.spec == P(lead, None, "tp")


def test_remat_recomputes_the_same_gradients():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        model = block()
        gradients = nnx.jit(nnx.grad(nnx.remat(loss)))(model, x)
    expected = loss_and_gradients(plain_block(), x)[1]
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))


@pytest.mark.parametrize("around", ["remat", "scan"])
def test_gradients_work_under_disable_jit(around):
    def total(model, x):
        graph, state = nnx.split(model)

        def call(x, _=None):
            return nnx.merge(graph, state)(x), None

        if around == "remat":
            return jnp.sum(jnp.sin(jax.checkpoint(call)(x)[0]))
        return jnp.sum(jnp.sin(jax.lax.scan(call, x, length=1)[0]))

    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        gradients = nnx.grad(total)(block(), x)
    expected = loss_and_gradients(plain_block(), x)[1]
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))


def test_an_extra_batch_axis_is_mapped():
    x = normal(0, (3, 4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        model = block()
        y = nnx.jit(lambda model, x: jax.vmap(model)(x))(model, x)
    assert_trees_close(y, plain_block()(x))


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_stacked_layers_are_scanned(types):
    axis = {"transform_metadata": {nnx.PARTITION_NAME: None}}

    def stack(make):
        create = nnx.vmap(make, in_axes=0, out_axes=0, **axis)
        return nnx.split_rngs(splits=3)(create)(nnx.Rngs(0))

    def run(model, x):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **axis)
        return jnp.sum(jnp.sin(scan(lambda layer, x: layer(x))(model, x)))

    x = normal(0, (4, 8, 16))
    expected = nnx.value_and_grad(run)(stack(plain_block), x)
    with jax.set_mesh(mesh_of(2, 2, types)):
        model = stack(block)
        assert model.up.kernel.sharding.spec == P(None, None, "tp")
        x = jax.device_put(np.asarray(x), P("dp", "tp"))
        value, gradients = nnx.jit(nnx.value_and_grad(run))(model, x)
    assert_trees_close(value, expected[0], rtol=1e-4)
    assert_trees_close(nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected[1]))


def test_few_functions_are_between_a_layer_and_its_call(monkeypatch):
    stacks, call = [], Call.__call__

    def recorded(self, *operands, **options):
        stack = traceback.extract_stack()
        stacks.append([each.name for each in stack if "jax_ub/_src" in each.filename])
        return call(self, *operands, **options)

    monkeypatch.setattr(Call, "__call__", recorded)
    with jax.set_mesh(mesh_of(2, 2)):
        layer = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0))
        jax.eval_shape(layer, normal(0, (2, 20, 16)))  # sizes not traced before
    (names,) = stacks
    assert names == [
        "__call__",
        "sharded_linear",
        "_shard_mapped",
        "parallel_linear",
        "column_forward",
        "all_gather_matmul",
    ]
