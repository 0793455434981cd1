"""Transformer Engine's `ub_*` flags of layers, by the calls of the compiled program."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import assert_trees_close, mesh_of, random_layer
from operands import normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub import flax as layers
from jax_ub.errors import (
    ConfigurationError,
    UnknownArgumentError,
    UnknownNameError,
    UnsupportedOverlapError,
)
from jax_ub.flax import linen

X = (2, 8, 16)
AG, RS, BULK = "all_gather_matmul", "matmul_reduce_scatter", "ub_bulk_dgrad"
FULL = {AG: 1, RS: 1, "wgrad": 1}
GATHER, SCATTER = {"all-gather": 1}, {"reduce-scatter": 1}
IN_BULK = {AG: 1, "bulk_all_gather": 1, "bulk_reduce_scatter": 1}
NO_BULK = {"ub_bulk_dgrad": False, "ub_bulk_wgrad": False}
NO_BACKWARD = {"ub_overlap_rs_dgrad": False, **NO_BULK}

# jax_ub calls and XLA collectives of a forward and a backward pass.
COLUMN = [
    ({}, FULL, {}),
    ({"ub_overlap_ag": True}, FULL, {}),
    ({"ub_overlap_ag": False}, {RS: 1, "wgrad": 1}, GATHER),
    ({"ub_overlap_rs_dgrad": True, **NO_BULK}, FULL, {}),
    ({"ub_overlap_rs_dgrad": False}, IN_BULK, {}),
    ({"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}, IN_BULK, {}),
    ({"ub_bulk_wgrad": True}, IN_BULK, {}),
    ({"ub_bulk_dgrad": False}, FULL, {}),
    (NO_BACKWARD, {AG: 1}, {**GATHER, **SCATTER}),
    ({"ub_overlap_rs": True}, FULL, {}),  # of row layers
]
ROW = [
    ({"ub_overlap_rs": True, "ub_overlap_ag": True}, FULL, {}),
    ({"ub_overlap_rs": False}, {AG: 1, "wgrad": 1}, SCATTER),
    ({"ub_overlap_ag": False}, {RS: 1}, GATHER),
    ({"ub_bulk_dgrad": True}, FULL, {}),  # of column layers
]
CASES = [("column", *case) for case in COLUMN] + [("row", *case) for case in ROW]


def loss_of(model):
    graph, state = nnx.split(model)

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

    return jax.jit(jax.value_and_grad(loss, (0, 1))), state


def linear(parallel, **options):
    return layers.Linear(16, 32, parallel=parallel, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(("parallel", "flags", "expected", "others"), CASES)
def test_a_flag_decides_which_communication_overlaps(parallel, flags, expected, others):
    mesh, x = mesh_of(1, 4), normal(0, X)
    options = {"mesh": mesh, "use_bias": False}
    step, state = loss_of(linear(parallel, **options, **flags))
    text = compiled_text(step, state, x)
    assert calls(text) == expected
    # The sum of the loss is an all-reduce.
    found = collectives(text)
    found.pop("all-reduce", None)
    assert found == others
    plain, _ = loss_of(linear(parallel, method="xla", **options))
    assert_trees_close(step(state, x), plain(state, x), rtol=1e-4)


MODULES = {
    "LayerNormLinear": (16, 32),
    "LayerNormMLP": (16, 32),
    "MultiHeadAttention": (4, 16),
    "TransformerLayer": (16, 32, 4),
}
LINEN_SIZES = {
    **MODULES,
    "Linear": (32,),
    "LayerNormLinear": (32,),
    "MultiHeadAttention": (4,),
}
EVERY = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad"), True
)
BOTH = {AG: 2, "bulk_all_gather": 1, "bulk_reduce_scatter": 1, RS: 1, "wgrad": 1}


def program_of_nnx(name, **options):
    parallel = {"parallel": "column"} if name == "LayerNormLinear" else {}
    make = getattr(layers, name)
    model = random_layer(make, *MODULES[name], **parallel, **options)
    return *loss_of(model), X


def program_of_linen(name, **options):
    parallel = {"parallel": "column"} if name == "LayerNormLinear" else {}
    make = getattr(linen, name)
    model = make(*LINEN_SIZES[name], **parallel, **options)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones(X))

    def loss(variables, x):
        return jnp.sum(jnp.sin(model.apply(variables, x)))

    return jax.jit(jax.value_and_grad(loss, (0, 1))), variables, X


@covering(
    # A transformer layer has an MLP and attention.
    name=["LayerNormLinear", "TransformerLayer"]
    + nightly("LayerNormMLP", "MultiHeadAttention"),
    program_of=[program_of_nnx, program_of_linen],
)
def test_modules_pass_the_flags_to_their_layers(name, program_of):
    times = 2 if name == "TransformerLayer" else 1
    with jax.set_mesh(mesh_of(1, 4)):
        step, state, shape = program_of(name, **EVERY)
        expected = IN_BULK if name == "LayerNormLinear" else BOTH
        program = step.lower(state, jnp.ones(shape))
        assert "jax_ub$" in program.as_text()
        found = calls(program.compile().as_text())
        assert found == {target: times * num for target, num in expected.items()}
        none = dict.fromkeys(EVERY, False)
        step, state, _ = program_of(name, ub_overlap_rs_dgrad=False, **none)
        assert "jax_ub$" not in step.lower(state, jnp.ones(shape)).as_text()


def methods_in(step, *operands):
    text = step.lower(*operands).as_text()
    found = re.findall(r"@jax_ub\$(\w+)\(.*?method = (\d)", text)
    return collections.Counter(found)


def test_flags_override_the_defaults_of_a_name_but_not_its_configuration():
    mesh, x = mesh_of(1, 4), jnp.ones(X)
    configured = {"fc1_fprop": {"method": "pipeline"}}
    ub.initialize_ub((64, 32), 4, dtype=jnp.float32, ub_cfgs=configured, mesh=mesh)
    options = {"mesh": mesh, "ub_name": "fc1", "use_bias": False}
    # Transformer Engine's default of "fc1_dgrad" is bulk.
    step, state = loss_of(linear("column", **options))
    assert calls(compiled_text(step, state, x)) == IN_BULK
    step, state = loss_of(linear("column", ub_overlap_ag=True, **NO_BULK, **options))
    found = methods_in(step, state, x)
    assert found == {(AG, "2"): 1, (RS, "0"): 1, ("wgrad", "0"): 1}
    step, state = loss_of(linear("column", ub_overlap_ag=False, **options))
    message = (
        r"all_gather_matmul \(ub_name 'fc1'\): ub_overlap_ag = False, but "
        r'ub_cfgs\["fc1_fprop"\] with method "pipeline" overlaps the all-gather of .*'
        "Leave one of the two out"
    )
    with pytest.raises(ConfigurationError, match=message):
        step.lower(state, x)


def test_a_flag_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    mesh, x = mesh_of(1, 4), jnp.ones(X)
    step, state = loss_of(linear("column", mesh=mesh, ub_overlap_ag=True))
    assert calls(compiled_text(step, state, x)) == {AG: 1}


def test_a_true_flag_never_falls_back():
    x = jnp.ones(X)

    def lower(**flags):
        step, state = loss_of(linear("column", **flags))
        return step.trace(state, x).lower(lowering_platforms=("tpu",))

    with jax.set_mesh(mesh_of(1, 4)):
        assert "jax_ub$" not in lower().as_text()
        with pytest.raises(UnsupportedOverlapError, match="no engine for tpu"):
            lower(ub_overlap_ag=True)


REFUSED = [
    (
        {"ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True},
        ConfigurationError,
        "ub_overlap_rs_dgrad = True and ub_bulk_dgrad = True, but .* Leave one of",
    ),
    (
        {"ub_bulk_dgrad": True, "ub_bulk_wgrad": False},
        UnsupportedOverlapError,
        "ub_bulk_dgrad = True and ub_bulk_wgrad = False, .* Pass equal values",
    ),
    (
        {"ub_overlap_ag": True, "method": "xla"},
        ConfigurationError,
        'ub_overlap_ag = True, but method = "xla" does not overlap the all-gather',
    ),
    (
        {"ub_overlap_ag": False, "method": "ring_exchange"},
        ConfigurationError,
        'ub_overlap_ag = False, but method = "ring_exchange" overlaps the all-gather',
    ),
    (
        {"ub_bulk_wgrad": True, "method": "direct"},
        ConfigurationError,
        'ub_bulk_wgrad = True, but method = "direct" does not overlap the reduce-sca',
    ),
    (
        {"ub_overlap_ag": True, "sequence_parallel": False},
        UnsupportedOverlapError,
        "ub_overlap_ag = True, but with sequence_parallel = False .* Pass sequence_p",
    ),
    (
        {"ub_overlap_ag": "yes"},
        UnknownNameError,
        "ub_overlap_ag = 'yes' is not a bool. Pass True or False",
    ),
]


@covering(name=[*MODULES, "Linear"], refused=REFUSED)
def test_contradictions_name_the_layer_and_the_fix(name, refused):
    options, error, message = refused
    label = name if name in MODULES else r"linear\(parallel='column'\)"
    column = {"parallel": "column"} if "Linear" in name else {}
    make, sizes = getattr(layers, name), MODULES.get(name, (16, 32))
    with pytest.raises(error, match=f"^{label}: {message}"):
        make(*sizes, rngs=nnx.Rngs(0), **column, **options)
    module = getattr(linen, name)(*LINEN_SIZES[name], **column, **options)
    with pytest.raises(error, match=f"^{label}: {message}"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones(X))


def test_a_layer_that_is_not_parallel_overlaps_nothing():
    message = r"^linear\(parallel=None\): ub_overlap_ag = True, .* Pass parallel="
    with pytest.raises(UnsupportedOverlapError, match=message):
        linear(None, ub_overlap_ag=True)
    linear(None, ub_overlap_ag=False)


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_argument_names_the_module_and_the_nearest(name):
    message = f"^{name}: it has no argument 'ub_overlap_gg'. Did you mean 'ub_overlap_a"
    for error in (UnknownArgumentError, TypeError, ValueError):
        with pytest.raises(error, match=message):
            getattr(layers, name)(*MODULES[name], rngs=nnx.Rngs(0), ub_overlap_gg=True)
