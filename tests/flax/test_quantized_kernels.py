"""Kernels of several dimensions, as in attention, that a step has quantized once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from flax import nnx
from flax_models import assert_trees_close, random_layer, random_variables
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import compiled_text, loop_text, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES

import jax_ub as ub
from jax_ub.errors import ShapeContractError
from jax_ub.flax import Linear, MultiHeadAttention, linen

FP8 = ub.fp8
HEADS, FEATURES, QKV_FEATURES = 4, 64, 128
X, DY = normal(0, (2, 8, FEATURES)), normal(1, (2, 8, FEATURES))


def num_contracted(path, _):
    """Returns the number of contracted dimensions of a kernel, or False for a bias."""
    name = jax.tree_util.keystr(path)
    return "kernel" in name and (2 if "'out'" in name else 1)


def quantized(params, recipe):
    return FP8.quantize_params(params, recipe, select=num_contracted)


def attention(library, **options):
    """Returns the parameters of attention, and a function of parameters and inputs.

    There are no biases, because the gradient of the bias of the keys is zero.
    """
    options["use_bias"] = False
    if library == "linen":
        layer = linen.MultiHeadAttention(HEADS, QKV_FEATURES, **options)
        return random_variables(layer, X), layer.apply
    layer = random_layer(MultiHeadAttention, HEADS, FEATURES, QKV_FEATURES, **options)
    graph, params = nnx.split(layer)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def num_kernel_casts(text):
    """Counts the casts of kernels' shards, with one head of 32 features, to FP8.

    On CPUs a cast is a custom call, or XLA's conversion if XLA partitions it.
    """
    shapes = "(?:1,)*64,(?:1,)*32|(?:1,)*32,64"
    casts = r"convert\(.*jit\(cast\)|custom-call\(.*\"jax_ub\.cast\""
    return len(re.findall(rf"= f8e4m3fn\[(?:{shapes})\]\S* (?:{casts})", text))


@covering(library=["nnx", "linen"], recipe=["row", "block"])
def test_kernels_are_quantized_in_front_of_loops_over_microbatches_and_layers(
    library, recipe
):
    recipe = RECIPES[recipe]
    with jax.set_mesh(tp_mesh(4)):
        params, apply = attention(library, fp8=recipe)
        params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)

        def loss(params, is_given):
            def layer(x, params):
                return x + apply(params, x), None

            if is_given:
                params = jax.vmap(lambda params: quantized(params, recipe))(params)
            ys = jax.lax.map(
                lambda x: jax.lax.scan(layer, x, params)[0], jnp.stack([X, 2 * X])
            )
            return jnp.sum(ys * DY)

        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        wanted, found = (step(params, is_given) for is_given in (False, True))
        texts = [compiled_text(step, params, given) for given in (False, True)]
    assert_trees_close(found, wanted, rtol=1e-5, atol=1e-5)
    casts, casts_of_given = (num_kernel_casts(loop_text(text)) for text in texts)
    assert casts >= 4  # of query, key, value and out
    assert casts_of_given == 0


@covering(axis_type=["Explicit", "Auto"], recipe=["block", "row"])
def test_kernels_whose_heads_are_sharded_are_also_sharded_by_fsdp(axis_type, recipe):
    recipe, axis_types = RECIPES[recipe], (getattr(AxisType, axis_type),) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), axis_types=axis_types)):
        params, apply = attention("nnx", fp8=recipe, fsdp_axes="dp")
        x = jax.device_put(X, P("dp", "tp"))

        def loss(params, is_given):
            params = quantized(params, recipe) if is_given else params
            return jnp.sum(jnp.sin(apply(params, x)))

        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        wanted, found = (step(params, is_given) for is_given in (False, True))
    assert_trees_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_given_kernels_whose_scales_do_not_fit():
    columns = (
        r"kernel is a ub\.ScaledArray of shape \(64, 4, 16\) with scales of shape "
        r"\(1, 1, 16\), but the layer takes scales of shape \(1, 4, 16\)\. Let select "
        r"of ub\.fp8\.quantize_params return 1, the number of contracted dimensions, or"
    )
    # Scales [1, 32, 64] have as many elements as the scales [32, 1, 64] of the layer.
    blocks = r"shape \(1, 32, 64\), but .* scales of shape \(32, 1, 64\)\. .* return 2"
    shards = r"kernel \(96, 64\) has 3 scales along K, which do not divide into the "
    with jax.set_mesh(tp_mesh(2)):
        for text, sizes, recipe, answer, parallel in (
            (columns, (64, (4, 16)), "row", 2, "column"),
            (blocks, ((32, 32), 64), "block", 1, "row"),
            (shards, (96, 64), "block", 1, "row"),
        ):
            recipe, options = RECIPES[recipe], {"parallel": parallel, "use_bias": False}
            layer = random_layer(Linear, *sizes, fp8=recipe, **options)
            graph, params = nnx.split(layer)
            params = FP8.quantize_params(params, recipe, select=lambda *_, n=answer: n)
            x = np.ones((2, 8, *np.atleast_1d(sizes[0])), "float32")
            with pytest.raises(ShapeContractError, match=text):
                nnx.merge(graph, params)(x)
