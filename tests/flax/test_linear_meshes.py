import jax
import numpy as np
import pytest
from covering import covering
from flax import nnx
from flax_models import TYPES, assert_trees_close, mesh_of
from jax.sharding import PartitionSpec as P
from operands import normal

from jax_ub.errors import ShapeContractError
from jax_ub.flax import Linear, TransformerLayer, linen


@pytest.mark.parametrize(
    ("types", "is_given"), [("auto", False), ("explicit", False), ("explicit", True)]
)
def test_a_layer_can_be_created_inside_a_shard_map_over_data_axes_only(types, is_given):
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2, types)):
        options = {"mesh": jax.sharding.get_mesh()} if is_given else {}

        @jax.jit
        @jax.shard_map(in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        def apply(x):
            layer = Linear(16, 32, parallel="column", rngs=nnx.Rngs(0), **options)
            assert nnx.get_partition_spec(layer.kernel).get_value() == P(None, "tp")
            return layer(x)

        y = apply(jax.device_put(x, P("dp", "tp")))
    assert_trees_close(y, nnx.Linear(16, 32, rngs=nnx.Rngs(0))(x))


@covering(
    parallel=("column", "row", None), types=["auto", "explicit"], twin=["nnx", "linen"]
)
def test_the_axis_types_of_set_mesh_replace_those_of_the_argument(
    parallel, types, twin
):
    other = {"auto": "explicit", "explicit": "auto"}[types]
    x, mesh = normal(0, (4, 8, 16)), mesh_of(1, 2, other)
    with jax.set_mesh(mesh_of(1, 2, types)):
        if twin == "linen":
            layer = linen.Linear(32, parallel=parallel, mesh=mesh)
            variables = layer.init(jax.random.key(0), x)
            y = layer.apply(variables, x)
            kernel = variables["params"]["kernel"]
        else:
            layer = Linear(16, 32, parallel=parallel, mesh=mesh, rngs=nnx.Rngs(0))
            kernel, y = layer.kernel[...], layer(x)
        assert jax.typeof(y).sharding.mesh.axis_types == (TYPES[types],) * 2
    assert_trees_close(np.asarray(y), x @ np.asarray(kernel))


def test_a_layer_with_an_explicit_mesh_runs_inside_auto_axes():
    x, mesh = normal(0, (4, 8, 16)), mesh_of(1, 2, "explicit")
    with jax.set_mesh(mesh):
        layer = Linear(16, 32, parallel="column", mesh=mesh, rngs=nnx.Rngs(0))
        y = jax.sharding.auto_axes(layer, out_sharding=P(None, None, "tp"))(x)
    assert_trees_close(np.asarray(y), x @ np.asarray(layer.kernel[...]))


@covering(
    context=["auto", "explicit"],
    types=["auto", "explicit"],
    sizes=[(2, 2), (1, 2), (4, 1)],
    kind=["linear", "transformer"],
)
def test_a_mesh_of_other_sizes_than_that_of_set_mesh_is_named(
    context, types, sizes, kind
):
    options = {"mesh": mesh_of(*sizes, types), "rngs": nnx.Rngs(0)}
    with (
        jax.set_mesh(mesh_of(1, 4, context)),
        pytest.raises(
            ShapeContractError, match=r"linear\(.*: mesh = .* differs from the mesh of"
        ),
    ):
        if kind == "linear":
            Linear(16, 32, parallel="column", **options)(normal(0, (4, 8, 16)))
        else:
            TransformerLayer(16, 32, 4, **options)(normal(0, (4, 8, 16)))
