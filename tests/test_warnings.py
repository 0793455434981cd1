"""Warnings show the line of the program that caused them, not a line of jax_ub."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from flax_models import mesh_of

import jax_ub as ub
from jax_ub import ops
from jax_ub.flax import Linear
from jax_ub.flax.linen import Overlap


def without_main_grad():
    model = Linear(8, 8, parallel="column", main_grad=True, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(1, 2)):
        nnx.jit(nnx.grad(lambda model: jnp.sum(model(jnp.ones((4, 8))))))(model)


def on_a_mesh_without_the_axis():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(1, 2)):
        ub.overlap(model, {"": "column"})
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        jax.jit(lambda x: model(x))(jnp.ones((4, 8)))


def without_a_match():
    net = linen.Dense(8)
    variables = net.init(jax.random.key(0), jnp.ones((4, 8)))
    with jax.set_mesh(mesh_of(1, 2)), Overlap({"up": "column"}):
        net.apply(variables, jnp.ones((4, 8)))


def by_an_old_name():
    class Old(ops.FusedOperation):
        @classmethod
        def refusals(cls, ops):
            return {0: "never"}

    Old.unfused_reasons([])


@pytest.mark.parametrize(
    "cause",
    [without_main_grad, on_a_mesh_without_the_axis, without_a_match, by_an_old_name],
)
def test_a_warning_shows_the_line_of_the_program(cause):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cause()
    assert [warning.filename for warning in found] == [__file__]
