"""Rules in programs that are not compiled, and jaxprs that are differentiated twice."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.rules.vjp import is_placeholder, residual_or_placeholder

ROWS, COLUMNS = P("tp"), P(None, "tp")
WANTED = (0, 1, (0, 2), (0, 1, 2), 2, 0)


def column(x, w, bias):
    return ub.all_gather_matmul(x, w, bias=bias, axis_name="tp")


def row(x, w, bias):
    return ub.matmul_reduce_scatter(x, w, bias=bias, axis_name="tp")


def operands():
    return small_integers(0, (4, 6)), small_integers(1, (6, 8)), small_integers(2, (8,))


def gradients(layer, wanted):
    return jax.grad(lambda *args: (layer(*args) ** 2).sum(), argnums=wanted)(
        *operands()
    )


def plain(x, w, bias):
    return x @ w + bias


def sharded(layer, check_vma):
    specs = (ROWS, COLUMNS, P("tp")) if layer is column else (COLUMNS, ROWS, P())
    out = COLUMNS if layer is column else ROWS
    return jax.shard_map(
        layer, mesh=tp_mesh(2), in_specs=specs, out_specs=out, check_vma=check_vma
    )


@covering(layer=[column, row], check_vma=[True, False])
def test_runs_operation_by_operation(layer, check_vma):
    run = sharded(layer, check_vma)
    assert_equal(run(*operands()), plain(*operands()))
    assert_equal(gradients(run, (0, 1, 2)), gradients(plain, (0, 1, 2)))


# JAX stores the tree structure of residuals with a jaxpr, which may be differentiated
# again with respect to other operands.
@covering(layer=[column, row], compile_it=[True, False])
def test_one_program_is_differentiated_for_other_operands(layer, compile_it):
    run = sharded(layer, check_vma=True)
    if compile_it:
        run = jax.jit(run)
    for wanted in WANTED:
        assert_equal(gradients(run, wanted), gradients(plain, wanted))


# JAX also stores the axes over which residuals are mapped.
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_is_left_out_is_mapped_like_the_value_it_is_for(axis):
    left_out = jax.vmap(
        lambda x: residual_or_placeholder(False, x), axis, out_axes=None
    )
    with pytest.raises(ValueError, match=f"output was batched on axis {axis}"):
        left_out(jnp.zeros((2, 3, 4)))


def test_a_number_is_left_out_as_an_array_is():
    assert is_placeholder(residual_or_placeholder(False, jnp.float32(1)))
    with pytest.raises(ValueError, match="output was batched on axis 0"):
        jax.vmap(lambda x: residual_or_placeholder(False, x), out_axes=None)(
            jnp.zeros(2)
        )


def twice(function, first, second):
    """Calls a function of w and x in jax.vmap twice, with different gradients."""

    def calls(w, x):
        frozen = {
            "w": (jax.lax.stop_gradient(w), x),
            "x": (w, jax.lax.stop_gradient(x)),
        }
        one, other = (function(*frozen.get(name, (w, x))) for name in (first, second))
        return one + 3 * other

    return jax.vmap(calls)


@covering(of_ops=[False, True], frozen=list(itertools.permutations(["w", "x", ""], 2)))
def test_a_jaxpr_is_mapped_and_differentiated_for_other_operands(of_ops, frozen):
    linear = ops.Linear(4, 4, use_bias=False)
    seq = ops.Sequential(linear, ops.ConstantScale(2.0), linear)

    def layer(w, x):
        if of_ops:
            return seq(({"kernel": w}, {}, {"kernel": w}), x)
        return ub.linear(2 * ub.linear(x, w), w)

    def loss(function):
        run = twice(function, *frozen)
        return lambda w, x: (run(w, x) * small_integers(2, (2, 3, 4))).sum()

    w, x = small_integers(0, (2, 4, 4)), small_integers(1, (2, 3, 4))
    found = jax.grad(loss(jax.jit(layer)), (0, 1))(w, x)
    assert_equal(found, jax.grad(loss(lambda w, x: 2 * (x @ w) @ w), (0, 1))(w, x))
