"""Targets of the fuzz test: all public functions, layers, operations, commands."""

import contextlib
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from bad_values import Target
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import jax_ub as ub
import jax_ub.flax
from jax_ub import ops
from jax_ub.flax import linen

NUM_RANKS = 4


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:NUM_RANKS]), ("tp",))


def traced(function, make):
    """Traces a call inside `jax.shard_map`; computes nothing."""

    def local():
        function(**make())

    mapped = jax.shard_map(
        local, mesh=mesh(), in_specs=(), out_specs=None, check_vma=False
    )
    jax.eval_shape(mapped)


def differentiated(function, make):
    """Traces a call and the gradients of its operands, if it is differentiable."""

    def local():
        arguments = make()
        operands = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, jax.Array) and value.dtype == jnp.float32
        }

        def of(operands):
            y = function(**{**arguments, **operands})
            return sum(jnp.sum(leaf.astype("float32")) for leaf in jax.tree.leaves(y))

        jax.grad(of)(operands)

    mapped = jax.shard_map(
        local, mesh=mesh(), in_specs=(), out_specs=None, check_vma=False
    )
    jax.eval_shape(mapped)


def optional(function) -> list[str]:
    """Returns the names of a function's keyword arguments that have a default."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is not one.empty]


def _per_device(function, valid):
    return {
        function.__name__: Target(
            valid, functools.partial(traced, function), optional(function)
        ),
        f"grad of {function.__name__}": Target(
            valid, functools.partial(differentiated, function), optional(function)
        ),
    }


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


PER_DEVICE = {
    **_per_device(
        ub.all_gather_matmul,
        lambda: {"x": zeros(4, 8), "w": zeros(8, 8), "axis_name": "tp"},
    ),
    **_per_device(
        ub.matmul_reduce_scatter,
        lambda: {"x": zeros(8, 8), "w": zeros(8, 8), "axis_name": "tp"},
    ),
    **_per_device(
        ub.matmul_all_reduce,
        lambda: {"x": zeros(8, 8), "w": zeros(8, 8), "axis_name": "tp"},
    ),
    **_per_device(ub.all_reduce, lambda: {"x": zeros(8, 8), "axis_name": "tp"}),
    **_per_device(
        ub.dgrad_add,
        lambda: {"dy": zeros(8, 8), "w": zeros(8, 8), "residual": zeros(8, 8)},
    ),
    **_per_device(
        ub.wgrad_accumulate,
        lambda: {"x": zeros(8, 8), "dy": zeros(8, 8), "main_grad": zeros(8, 8)},
    ),
    **_per_device(
        ub.linear,
        lambda: (
            {"x": zeros(8, 8), "w": zeros(8, 8), "parallel": "column"}
            | {"axis_name": "tp"}
        ),
    ),
}


def _layer(make, valid, names=(), call=None):
    """A layer that is created and called with global arrays on the mesh."""

    def run(arguments):
        def whole():
            given = arguments()
            inputs = given.pop("inputs")
            called = {
                name.removeprefix("call "): given.pop(name)
                for name in list(given)
                if name.startswith("call ")
            }
            layer = make(**given)
            if isinstance(layer, nn.Module):
                layer.init(jax.random.key(0), inputs, **called)
            else:
                layer(inputs, **called)

        with jax.set_mesh(mesh()):
            jax.eval_shape(whole)

    return Target(valid, run, names)


def nnx_layers():
    called = {"inputs": lambda: zeros(1, 8, 16), "rngs": lambda: nnx.Rngs(0)}
    sizes = {
        "Linear": {"in_features": 16, "out_features": 32, "parallel": "column"},
        "LayerNormLinear": {"in_features": 16, "out_features": 32},
        "LayerNormMLP": {"hidden_size": 16, "ffn_hidden_size": 32},
        "MultiHeadAttention": {"num_heads": 4, "in_features": 16},
        "TransformerLayer": {"hidden_size": 16, "ffn_hidden_size": 32}
        | {"num_attention_heads": 4},
    }
    calls = {
        "Linear": ("residual", "out_sharding"),
        "LayerNormMLP": ("residual",),
        "MultiHeadAttention": (
            *("inputs_k", "inputs_v", "mask", "positions", "residual"),
            "deterministic",
        ),
        "TransformerLayer": ("mask", "positions", "deterministic"),
    }
    shared = [
        *jax_ub._src.flax.options.LinearOptions.__annotations__,
        *("ub_name", "parallel", "kernel_metadata", "preferred_element_type"),
        "num_heads",  # the layer passes these itself
    ]
    found = {}
    for name, given in sizes.items():
        make = getattr(jax_ub.flax, name)

        def valid(given=given, name=name):
            call = dict.fromkeys(f"call {each}" for each in calls.get(name, ()))
            return {**given, **{k: v() for k, v in called.items()}, **call}

        names = {*optional(make.__init__), *shared} - {"bias_metadata"}
        if name == "Linear":
            names -= {"num_heads"}
        found[f"nnx {name}"] = _layer(make, valid, sorted(names))
    return found


def linen_layers():
    sizes = {
        "Linear": {"features": 32, "parallel": "column"},
        "LayerNormLinear": {"features": 32},
        "LayerNormMLP": {"ffn_hidden_size": 32},
        "MultiHeadAttention": {"num_heads": 4},
        "TransformerLayer": {"hidden_size": 16, "ffn_hidden_size": 32}
        | {"num_attention_heads": 4},
    }
    found = {}
    for name, given in sizes.items():
        make = getattr(linen, name)
        names = [f.name for f in dataclasses.fields(make)]
        names = sorted({*names} - {"parent", "name"})

        def valid(given=given):
            return {**given, "inputs": zeros(1, 8, 16)}

        found[f"linen {name}"] = _layer(make, valid, names)
    return found


LAYERS = {**nnx_layers(), **linen_layers()}

_SIZES = {"in_features": 8, "out_features": 8}
_OPERATIONS = {
    "BasicLinear": {**_SIZES, "tensor_parallel_mode": "column"}
    | {"userbuffers_options": {"comm_name": "qkv"}, "sequence_parallel": True},
    "Linear": {**_SIZES},
    "Bias": {"size": 8},
    "AllReduce": {},
    "AllGather": {},
    "ReduceScatter": {},
    "MakeExtraOutput": {},
    "AddExtraInput": {},
    "Identity": {},
    "Reshape": {"shape": (-1, 8)},
    "ConstantScale": {"scale": 2.0},
    "Dropout": {"rate": 0.5},
    "GELU": {},
    "ReLU": {},
    "SiLU": {},
    "SwiGLU": {},
    "GEGLU": {},
    "LayerNorm": {"normalized_shape": 8},
    "RMSNorm": {"normalized_shape": 8},
    "Quantize": {},
}


_MADE = object()  # placeholder of the parameters that init creates


def _operation(name):
    """An operation alone in a Sequential, forward and backward."""
    make = getattr(ops, name)
    extra = name == "AddExtraInput"

    def run(arguments):
        def of(**given):
            call = {name: given.pop(name) for name in ("x", "key", "deterministic")}
            init_key, shard = given.pop("init key"), given.pop("params")
            extras = [given.pop("extra")] if extra else []
            seq = ops.Sequential(make(**given))
            made = seq.init(init_key)
            repr(seq), hash(seq), seq.basic_ops
            shard = _shards(made, seq.specs()) if shard is _MADE else shard
            given = (call["x"], *extras)

            def loss(shard, given):
                found = seq(
                    shard,
                    *given,
                    key=call["key"],
                    deterministic=call["deterministic"],
                )
                leaves = jax.tree.leaves(found)
                return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

            loss(shard, given)
            if all(map(_is_float, given)):
                jax.grad(loss, argnums=1)(shard, given)

        traced(of, arguments)

    def valid():
        return {
            **_OPERATIONS[name],
            "x": zeros(8, 8),
            "key": jax.random.key(0),
            "init key": jax.random.key(0),
            "params": _MADE,
            "deterministic": False,
            **({"extra": zeros(8, 8)} if extra else {}),
        }

    return Target(valid, run, optional(make.__init__))


def _is_float(value):
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)


def _shards(params, specs):
    """Returns the parameter shards of one rank."""

    def shard(array, spec):
        sizes = zip(array.shape, (*spec, *[None] * array.ndim), strict=False)
        shape = [size // (1 if name is None else NUM_RANKS) for size, name in sizes]
        return jnp.zeros(shape, array.dtype)

    return jax.tree.map(shard, params, specs)


OPERATIONS = {f"ops.{name}": _operation(name) for name in _OPERATIONS}


def called(function, valid, names=(), fixed=()):
    """Returns the target of a function that is called outside `jax.shard_map`."""

    def run(arguments):
        try:
            found = function(**arguments())
            if isinstance(found, contextlib.AbstractContextManager):
                with found:
                    pass
        finally:
            ub.destroy_ub()

    return Target(valid, run, names, fixed=fixed)


def _model():
    with jax.set_mesh(mesh()):
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def without(target, *names):
    """Returns the target without these bad values."""
    values = {name: make for name, make in target.values.items() if name not in names}
    return dataclasses.replace(target, values=values)


def without_deep_trees(target):
    # JAX's C++ code raises a `SystemError` for trees deeper than Python's stack.
    return without(target, "nested list", "nested dict", "a list in itself")


def _initialized(function, valid, names=()):
    """Returns the target of a function that is called after `initialize_ub`."""

    def run(arguments):
        ub.initialize_ub((64, 64), NUM_RANKS, mesh=mesh(), axis_name="tp")
        called(function, valid).run(arguments)

    return Target(valid, run, names)


def _dot_general(**given):
    x, kernel = given.pop("x"), given.pop("w")
    numbers = given.pop("dimension_numbers")
    dot = ub.dot_general(**given)
    with jax.set_mesh(mesh()):
        try:
            jax.eval_shape(lambda: dot(x, kernel, numbers))
        except TypeError as error:  # JAX computes every other contraction
            if not str(error).startswith("dot_general requires"):
                raise


def _linen_overlap(**given):
    overlap = linen.Overlap(**given)
    with jax.set_mesh(mesh()), nn.intercept_methods(overlap):
        jax.eval_shape(lambda: nn.Dense(8).init(jax.random.key(0), zeros(1, 8, 8)))


_CFGS = {
    "qkv_fprop": {"method": "ring_exchange", "aggregate": 0, "num_sm": 1},
    "proj_fprop": {"method": "pipeline", "num_splits": 4, "comm_priority": -1},
    "own_fprop": {"comm_type": "RS", "is_reduce_scatter": 1, "cga_size": 2},
}
CONFIGURATION = {
    "initialize_ub": called(
        ub.initialize_ub,
        lambda: {
            "shape": (64, 64),
            "tp_size": NUM_RANKS,
            "ub_cfgs": _CFGS,
            "mesh": mesh(),
        },
        optional(ub.initialize_ub),
    ),
    "get_ub": _initialized(
        ub.get_ub, lambda: {"name": "qkv_fprop"}, optional(ub.get_ub)
    ),
    "destroy_ub": _initialized(ub.destroy_ub, dict, optional(ub.destroy_ub)),
    "is_ub_initialized": _initialized(
        ub.is_ub_initialized, dict, optional(ub.is_ub_initialized)
    ),
    "from_te": called(ub.overlap_config.from_te, lambda: {"source": _CFGS}),
    "overlap": called(
        ub.overlap,
        lambda: {"model": _model(), "rules": {".*": "column"}},
        optional(ub.overlap),
    ),
    "overlapped": called(ub.overlapped, lambda: {"model": _model()}),
    "dot_general": called(
        _dot_general,
        lambda: {
            "kind": "column",
            "x": zeros(8, 8),
            "w": zeros(8, 8),
            "dimension_numbers": (((1,), (0,)), ((), ())),
        },
        optional(ub.dot_general),
    ),
    "linen Overlap": called(
        _linen_overlap,
        lambda: {"rules": {".*": "column"}},
        optional(linen.Overlap.__init__),
    ),
    "explain": called(
        ub.explain,
        lambda: {"fn": lambda x: x, "x": 1.0},
        ("hardware", "trace"),
        fixed=("x",),
    ),
    "trace": called(ub.trace, dict, ("path", "events_per_thread")),
}


def _fp8_state():
    return {"mlp": ub.fp8.init_state(ub.fp8.DelayedScaling())}


def _per_rank(function, valid):
    return Target(valid, functools.partial(traced, function), optional(function))


FP8 = {
    "quantize": _per_rank(ub.quantize, lambda: {"x": zeros(64, 64)}),
    "quantize with a state": _per_rank(
        ub.quantize,
        lambda: (
            {"x": zeros(64, 64), "recipe": ub.fp8.DelayedScaling()}
            | {"state": _fp8_state()["mlp"]}
        ),
    ),
    "init_state": _per_rank(
        ub.fp8.init_state, lambda: {"recipe": ub.fp8.DelayedScaling()}
    ),
    "quantize_params": without(
        without_deep_trees(
            _per_rank(
                ub.fp8.quantize_params,
                lambda: {"params": {"up": {"kernel": zeros(64, 8)}}},
            )
        ),
        *("a class", "jnp.float32", "int32"),  # raise their own errors when called
    ),
    "apply_updates": without_deep_trees(
        _per_rank(
            ub.fp8.apply_updates,
            lambda: {"state": _fp8_state(), "gradients": _fp8_state()},
        )
    ),
    **{
        f"fp8.{kind.__name__}": called(
            kind, dict, [field.name for field in dataclasses.fields(kind)]
        )
        for kind in vars(ub.fp8).values()
        if dataclasses.is_dataclass(kind)
    },
}

TARGETS: dict[str, Target] = {
    **PER_DEVICE,
    **LAYERS,
    **OPERATIONS,
    **CONFIGURATION,
    **FP8,
}
