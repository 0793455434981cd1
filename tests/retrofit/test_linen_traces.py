"""`Overlap` and functions that `jax.jit` and `nn.jit` have traced in other contexts."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax_models import assert_trees_close, mesh_of, random_variables
from operands import normal
from programs import calls, compiled_text

import jax_ub as ub
from jax_ub.flax.linen import Overlap

RULES = {r".*\.up": "column", r".*\.down": "row"}
RECIPE = ub.fp8.Float8CurrentScaling()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16, name="down")(nn.Dense(32, name="up")(x))


class Net(nn.Module):
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = self.block(name=f"b{i}")(x)
        return x


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(mesh_of(1, 2)) as mesh:
        yield mesh


def model(block=Block):
    net, x = Net(block), jnp.array(normal(0, (4, 16)))
    return net, random_variables(net, x), x


def test_a_function_that_was_traced_before_the_block_is_traced_again_in_it():
    net, variables, x = model()
    apply = jax.jit(net.apply)
    plain = apply(variables, x)
    with Overlap(RULES) as overlap:
        text = compiled_text(apply, variables, x)
        apply(variables, x)
    assert len(overlap.overlapped) == 6
    assert calls(text) == {"all_gather_matmul": 3, "matmul_reduce_scatter": 3}
    assert (apply(variables, x) == plain).all()
    assert calls(compiled_text(apply, variables, x)) == {}


def test_blocks_with_other_settings_do_not_share_a_trace():
    net, variables, x = model(nn.jit(Block))
    plain = net.apply(variables, x)
    found = []
    for recipe in (None, RECIPE, None):
        with Overlap(RULES, fp8=recipe) as overlap:
            found.append(net.apply(variables, x))
        found.append(net.apply(variables, x))
        with nn.intercept_methods(overlap):
            found.append(net.apply(variables, x))
    assert all((each == plain).all() for each in found[1::3])
    assert all((a == b).all() for a, b in zip(found[::3], found[2::3], strict=True))
    assert (found[0] == found[6]).all() and (found[0] != found[3]).any()


def test_nested_blocks_share_a_trace_only_if_all_settings_are_equal():
    net, variables, x = model()
    apply = jax.jit(net.apply)
    up, down = ({name: kind} for name, kind in RULES.items())
    with Overlap(up), Overlap(down):
        nested = compiled_text(apply, variables, x)
    assert calls(nested) == {"all_gather_matmul": 3, "matmul_reduce_scatter": 3}
    with Overlap(down):
        text = compiled_text(apply, variables, x)
    assert calls(text) == {"matmul_reduce_scatter": 3}
    with Overlap({r"b0\.up": "column"}), Overlap(down):
        text = compiled_text(apply, variables, x)
    assert calls(text) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 3}


def test_a_layer_is_overlapped_once_in_nested_blocks_with_equal_settings():
    net, _, x = model()
    recipe = ub.fp8.DelayedScaling()
    with Overlap(RULES, fp8=recipe) as outer, Overlap(RULES, fp8=recipe) as inner:
        nested = net.init_with_output(jax.random.key(0), x)
    with Overlap(RULES, fp8=recipe):
        expected = net.init_with_output(jax.random.key(0), x)
    assert outer.overlapped == inner.overlapped and len(inner.overlapped) == 6
    assert_trees_close(nested, expected)


class Einsums(nn.Module):
    """A layer of each kind that `Overlap` supports; one embedding is not tied."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(), (None, "tp"))
        x = nn.Dense(16, kernel_init=init, name="dense")(x)
        x = nn.Einsum((16, 16), "td,df->tf", kernel_init=init, name="einsum")(x)
        return nn.Embed(16, 16, name="embed").attend(x)


def test_the_innermost_block_that_has_a_rule_for_a_layer_applies():
    net, x = Einsums(), jnp.array(normal(0, (4, 16)))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    outer = Overlap({".*": "column"}, method="pipeline", fp8=ub.fp8.DelayedScaling())
    inner = Overlap({"dense|einsum|embed.attend": "column"}, method="direct")
    excluding = Overlap({"einsum": None, "embed.attend": None})

    def methods(*blocks):
        ub.fallbacks(clear=True)
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            rows = ub.explain(net.apply, variables, x).rows
        return {row.scope: row.method for row in rows if row.overlapped}

    expected = dict.fromkeys(("dense", "einsum", "embed.attend"), "direct")
    assert methods(outer, inner) == expected
    assert (outer.overlapped, len(inner.overlapped)) == ({}, 3)
    assert ub.fallbacks() == ()
    assert methods(inner, excluding) == {"dense": "direct"}
    assert {each.label for each in ub.fallbacks()} == {"overlap('einsum.kernel')"}
    # Neither block lists the layer of the other.
    assert len(methods(Overlap({"dense": "column"}), Overlap({"ei.*": "column"}))) == 2
    assert ub.fallbacks() == ()


def test_equal_blocks_share_a_trace_without_warnings():
    net, variables, x = model()
    traced = []
    apply = jax.jit(lambda *args: traced.append(0) or net.apply(*args))
    for _ in range(3):
        with Overlap(RULES, mesh=mesh_of(1, 2)):
            apply(variables, x)
    assert len(traced) == 1


@pytest.mark.parametrize("jitted", [nn.jit(Block), nn.jit(nn.remat(Block))])
def test_settings_by_the_path_of_an_nn_jit_module_are_a_warning(jitted, recwarn):
    net, variables, x = model(jitted)
    with Overlap(RULES) as overlap:
        jax.jit(net.apply)(variables, x)
    assert overlap.overlapped == {"b0.up": "column", "b0.down": "row"}
    with Overlap(RULES, fp8={r"b0\..*": None}):  # None of the modules is FP8
        jax.jit(net.apply)(variables, x)
    assert not recwarn.list
    text = "'b0.up' apply to all modules that are equal to 'b0'.*'b0.*' depends on its"
    overlap = Overlap(RULES, fp8={r"b0\..*": RECIPE})
    with pytest.warns(UserWarning, match=text) as warned, overlap:
        jax.jit(net.apply)(variables, x)
    assert len(warned) == 1  # for two layers
    overlap = Overlap({r"b1\.up": None, **RULES})
    text = "matched no nn.Dense.*nn.jit traces only one of equal modules"
    with pytest.warns(UserWarning, match=text), overlap:
        jax.jit(net.apply)(variables, x)
