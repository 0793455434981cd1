"""Parameters and accumulators in the hands of optax and orbax."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from ops_on_ranks import integers_of
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError


@pytest.mark.parametrize("merge", [ops.merge_main_grads, ops.merge_fp8_states])
def test_trees_that_differ_are_not_merged(merge):
    with pytest.raises(ShapeContractError, match=rf"{merge.__name__}: .* trees: .*"):
        merge([{"kernel": 1}], 3)


class RaisesInFlatten:
    def flatten(self):
        raise RuntimeError("an error of the program")


jax.tree_util.register_pytree_node(
    RaisesInFlatten, RaisesInFlatten.flatten, lambda _, leaves: RaisesInFlatten()
)


@pytest.mark.parametrize("merge", [ops.merge_main_grads, ops.merge_fp8_states])
def test_an_error_of_a_node_is_no_difference_of_trees(merge):
    for trees in ((RaisesInFlatten(), 3), (3, RaisesInFlatten())):
        with pytest.raises(RuntimeError, match="^an error of the program$"):
            merge(*trees)


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        ([{"kernel": 1}, {}], r"has \[1\]\['main_grad'\], .* no \[1\]\['kernel'\]"),
        ({"mlp": [{"kernel": 1}, {"kernel": 1}]}, r"has \[0\]\['main_grad'\], but"),
        ([{"kernel": None}, {"kernel": 1}], r"has \[0\]\['main_grad'\], but"),
    ],
)
def test_a_main_grad_without_a_gradient_of_its_kernel_is_an_error(gradients, text):
    main_grads = [{"main_grad": 2}, {"main_grad": 3, "kernel": None}]
    with pytest.raises(ShapeContractError, match=text):
        ops.gradients_of_main_grads(gradients, main_grads)


def test_a_main_grad_replaces_the_gradient_of_a_quantized_kernel():
    gradients = [{"kernel": ub.quantize(jnp.ones((32, 8)), role="kernel")}]
    found = ops.gradients_of_main_grads(gradients, [{"main_grad": 2}])
    assert found == [{"kernel": 2}]


def test_a_single_array_is_split_as_a_weight():
    assert ops.split_main_grads(3) == (3, None)


def mlp():
    options = {"sequence_parallel": True, "accumulate_into_main_grad": True}
    return ops.Sequential(
        ops.Linear(8, 16, tensor_parallel_mode="column", **options),
        ops.ReLU(),
        ops.Linear(16, 8, tensor_parallel_mode="row", **options),
    )


def plain(params, x):
    up, _, down = params
    y = jax.nn.relu(x @ up["kernel"] + up["bias"])
    return y @ down["kernel"] + down["bias"]


def test_split_and_merge_are_inverses():
    params = integers_of(mlp())
    weights, main_grads = ops.split_main_grads(params)
    assert (
        sorted(main_grads[0]) == sorted(weights[0]) == ["bias", "kernel", "main_grad"]
    )
    assert len(jax.tree.leaves(main_grads)) == 2
    assert len(jax.tree.leaves(weights)) == 4
    assert_equal(ops.merge_main_grads(weights, main_grads), params)


def test_microbatches_accumulate_the_whole_gradient():
    seq, mesh = mlp(), tp_mesh(2)
    params = integers_of(seq)
    weights, main_grads = ops.split_main_grads(params)
    main_grads = jax.tree.map(jnp.zeros_like, main_grads)
    weight_specs, main_grad_specs = ops.split_main_grads(seq.specs())
    xs = small_integers(5, (3, 8, 8))

    def loss(weights, main_grads, x):
        return jnp.sum(seq(ops.merge_main_grads(weights, main_grads), x) ** 2)

    def accumulate(weights, main_grads, xs):
        zeros = jax.tree.map(jnp.zeros_like, weights)

        def microbatch(carried, x):
            others, main_grads = carried
            new, main_grads = jax.grad(loss, (0, 1))(weights, main_grads, x)
            return (jax.tree.map(jnp.add, others, new), main_grads), None

        (others, main_grads), _ = jax.lax.scan(microbatch, (zeros, main_grads), xs)
        return ops.gradients_of_main_grads(others, main_grads)

    specs = (weight_specs, main_grad_specs, P(None, "tp"))
    run = on_ranks(accumulate, mesh, specs, weight_specs)
    gradients = run(weights, main_grads, xs)
    total = lambda weights: sum(jnp.sum(plain(weights, x) ** 2) for x in xs)  # noqa: E731
    assert_equal(gradients, jax.jit(jax.grad(total))(weights))

    @jax.jit
    def step(gradients, weights):
        optimizer = optax.adamw(1e-2)
        updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
        return optax.apply_updates(weights, updates)

    moved = step(gradients, weights)
    assert jax.tree.structure(moved) == jax.tree.structure(weights)


def test_vmapped_main_grad_is_rejected():
    seq = ops.Sequential(ops.Linear(8, 16, accumulate_into_main_grad=True))
    weights, main_grads = ops.split_main_grads(integers_of(seq))

    def loss(main_grads, xs):
        params = ops.merge_main_grads(weights, main_grads)
        return jnp.sum(jax.vmap(lambda x: seq(params, x))(xs))

    message = "jax.vmap over 3 examples maps the gradient"
    with pytest.raises(UnsupportedOverlapError, match=message):
        jax.grad(loss)(main_grads, small_integers(5, (3, 4, 8)))


def test_a_gradient_without_the_main_grad_warns():
    seq = ops.Sequential(ops.Linear(8, 16, accumulate_into_main_grad=True))
    weights, main_grads = ops.split_main_grads(integers_of(seq))

    def loss(weights):
        params = ops.merge_main_grads(weights, main_grads)
        return jnp.sum(seq(params, small_integers(5, (4, 8))))

    with pytest.warns(UserWarning, match="leave out accumulate_into_main_grad"):
        jax.grad(loss)(weights)


def test_parameters_are_restored_from_a_checkpoint(tmp_path):
    seq, mesh = mlp(), tp_mesh(2)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seq.specs())
    params = jax.device_put(seq.init(jax.random.key(0)), shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", params)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(seq.init, jax.random.key(0))
        like = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=sharding
            ),
            shapes,
            shardings,
        )
        restored = checkpointer.restore(tmp_path / "step", like)
    assert_equal(restored, params)
    assert jax.tree.map(lambda p: p.sharding, restored) == shardings
