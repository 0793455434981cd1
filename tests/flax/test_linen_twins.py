"""linen and nnx modules have the same arguments and results."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from covering import nightly
from flax import nnx
from flax_models import assert_trees_close, mesh_of, random_variables
from operands import normal

import jax_ub.flax
from jax_ub._src.flax.options import LinearOptions
from jax_ub.flax import linen

X = (4, 8, 16)

# Positional arguments of the nnx and the linen module, and common keyword arguments.
TWINS: dict[str, tuple] = {
    "Linear": ((16, (4, 8)), ((4, 8),), {"parallel": "column"}),
    "LayerNormLinear": (
        (16, 32),
        (32,),
        {"parallel": "column", "epsilon": 0.1, "return_layernorm_output": True},
    ),
    "LayerNormMLP": (
        (16, 32),
        (16, 32),
        {"activation": "geglu", "normalization": "RMSNorm"},
    ),
    "MultiHeadAttention": (
        (4, 16),
        (4,),
        {"num_kv_heads": 2, "rotary_base": 100.0, "normalize_qk": True},
    ),
    "TransformerLayer": (
        (16, 32, 4),
        (16, 32, 4),
        {"num_gqa_groups": 2, "kv_channels": 6, "qk_norm_type": "RMSNorm"},
    ),
}


@pytest.mark.parametrize(
    "name", [*list(TWINS)[:3], "TransformerLayer", *nightly("MultiHeadAttention")]
)
def test_nnx_and_linen_give_the_same_results(name):
    sizes_of_nnx, sizes, options = TWINS[name]
    x = normal(0, X)
    ours = getattr(linen, name)(*sizes, **options)
    twin = getattr(jax_ub.flax, name)(*sizes_of_nnx, rngs=nnx.Rngs(0), **options)
    variables = random_variables(ours, x)
    state = nnx.state(twin, nnx.Param)
    nnx.replace_by_pure_dict(state, variables["params"])
    nnx.update(twin, state)
    with jax.set_mesh(mesh_of(2, 2)):
        y = jax.jit(ours.apply)(variables, x)
        expected = nnx.jit(lambda model, x: model(x))(twin, x)
    assert_trees_close(y, expected)


def arguments(function):
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.name != "self"}


SHARED = set(LinearOptions.__annotations__)
# Arguments that only nnx has, in jax_ub or in Flax.
ONLY_NNX = {"in_features", "in_kv_features", "rngs", "options", "out_sharding"}
ONLY_NNX |= {"preferred_element_type", "kernel_metadata", "bias_metadata"}
ONLY_LINEN = {"parent", "name", "axis"}
OTHER_DEFAULTS = {"deterministic", "kernel_init", "bias_init", "promote_dtype"}


@pytest.mark.parametrize("name", TWINS)
def test_nnx_and_linen_take_the_same_arguments(name):
    ours, twin = getattr(linen, name), getattr(jax_ub.flax, name)
    expected = arguments(twin.__init__)
    if name != "Linear":
        linear = arguments(jax_ub.flax.Linear.__init__)
        expected |= {field: linear[field] for field in SHARED}
    if name.endswith("Linear"):
        expected["features"] = expected.pop("out_features")
    expected = {k: v for k, v in expected.items() if k not in ONLY_NNX}
    fields = {k: v for k, v in arguments(ours).items() if k not in ONLY_LINEN}
    assert fields.keys() == expected.keys()
    for field in fields.keys() - OTHER_DEFAULTS:
        assert fields[field] == expected[field], field
    calls = [arguments(kind.__call__) for kind in (ours, twin)]
    assert calls[0].keys() == calls[1].keys() - ONLY_NNX


def test_the_common_arguments_are_passed_to_every_linear_layer():
    options: dict[str, Any] = {
        "use_bias": False,
        "param_dtype": jnp.bfloat16,
        "kernel_init": nn.initializers.ones,
        "axis_name": "model",
        "method": "direct",
    }
    layer = linen.TransformerLayer(16, 32, 4, **options)
    assert layer.linear_options().keys() == SHARED
    params = layer.init(jax.random.key(0), jnp.ones(X))["params"]
    kernels = [
        *(params["attention"][name] for name in ("query", "key", "value", "out")),
        *(params["mlp"][name] for name in ("fc1", "fc2")),
    ]
    for kernel in kernels:
        assert kernel.keys() == {"kernel"}
        assert kernel["kernel"].dtype == jnp.bfloat16
        assert jnp.all(kernel["kernel"] == 1)
