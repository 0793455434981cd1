"""Targets of the fuzz test: fused operations, lists of operations, registries."""

import contextlib
import functools

from bad_values import Target
from fuzz_targets import (
    called,
    optional,
    traced,
    without,
    without_deep_trees,
    zeros,
)

from jax_ub import ops

_PARTS = {
    "linear": lambda: ops.BasicLinear(8, 8),
    "bias": lambda: ops.Bias(8),
    "activation": ops.GELU,
    "add": lambda: ops.AddExtraInput(in_place=True),
    "scale": lambda: ops.ConstantScale(2.0),
    "rmsnorm": lambda: ops.RMSNorm(8),
    "backward_add": lambda: ops.MakeExtraOutput(in_place=True),
    "reduce_scatter": ops.ReduceScatter,
}
_FUSED = {
    "BackwardActivationBias": ("bias", "activation"),
    "BackwardAddRMSNorm": ("add", "rmsnorm"),
    "BackwardLinearAdd": ("backward_add", "linear"),
    "BackwardLinearScale": ("linear", "scale"),
    "ForwardLinearBiasActivation": ("linear", "bias", "activation"),
    "ForwardLinearBiasAdd": ("linear", "bias", "add"),
    "ForwardLinearScaleAdd": ("linear", "scale", "add"),
    "UserbuffersBackwardLinear": ("linear", "reduce_scatter"),
    "UserbuffersForwardLinear": ("linear", "reduce_scatter"),
}


def _parts(name):
    found = {part: _PARTS[part]() for part in _FUSED[name]}
    if name == "BackwardAddRMSNorm":
        found["add"] = ops.MakeExtraOutput()
    if name.startswith("Userbuffers"):
        options = {"comm_name": "qkv"}
        found["linear"] = ops.BasicLinear(8, 8, userbuffers_options=options)
    return found


def _functional(function, valid):
    return Target(valid, functools.partial(traced, function), optional(function))


_MODE = {"tensor_parallel_mode": "column", "axis_name": "tp"}
FUSED = {
    f"ops.fused.{name}": called(
        getattr(ops.fused, name),
        functools.partial(_parts, name),
        optional(getattr(ops.fused, name).__init__),
    )
    for name in _FUSED
} | {
    "functional_forward": _functional(
        ops.fused.UserbuffersForwardLinear.functional_forward,
        lambda: {"input": zeros(2, 8), "weight": zeros(8, 8), **_MODE},
    ),
    "functional_backward": _functional(
        ops.fused.UserbuffersBackwardLinear.functional_backward,
        lambda: (
            {"grad_output": zeros(8, 8), "input": zeros(2, 8)}
            | {"weight": zeros(8, 8), **_MODE}
        ),
    ),
}


def _sequential(kind, **given):
    seq = kind(*given.pop("ops")) if kind is ops.Sequential else kind(given.pop("ops"))
    x, params, extras = (given.pop(name) for name in ("x", "params", "extra_inputs"))
    seq(params, x, *extras, **given)


def _list():
    return {
        "ops": (ops.BasicLinear(8, 8), ops.AddExtraInput()),
        "params": ({"kernel": zeros(8, 8)}, {}),
        "x": zeros(8, 8),
        "extra_inputs": (zeros(8, 8),),
    }


def _explain(**given):
    ops.Sequential(ops.Linear(8, 8)).explain(**given)


def _registered(register, **given):
    with ops.without_fusions():
        try:
            register(**given)
        finally:
            ops.unregister_fusion(given["fusion"])


def _fusion(found):
    return found


_PARAMS = {"kernel": zeros(8, 8), "main_grad": zeros(8, 8)}
LISTS = {
    f"ops.{kind.__name__}": Target(
        _list,
        functools.partial(traced, functools.partial(_sequential, kind)),
        ("key", "deterministic"),
        fixed=("ops", "extra_inputs"),
    )
    for kind in (ops.Sequential, ops.OperationFuser)
} | {
    "Sequential.explain": called(
        _explain, dict, ("tokens", "num_ranks", "dtype", "hardware", "trace")
    ),
    **{
        f"ops.{register.__name__}": called(
            functools.partial(_registered, register), lambda: {"fusion": _fusion}
        )
        for register in (
            ops.register_joint_fusion,
            ops.register_forward_fusion,
            ops.register_backward_fusion,
        )
    },
}


def _on_trees(function, valid):
    return without_deep_trees(called(function, valid))


def _changed_list(method):
    """Returns a function that changes a `Sequential` like a Python list."""

    def run(**given):
        seq = ops.Sequential(ops.GELU(), ops.ReLU())
        with contextlib.suppress(IndexError):
            getattr(seq, method)(*given.values())

    return run


def _with_channel(kind, method):
    def run(**given):
        getattr(kind(), method)(**given)

    return run


_CHANNEL = {"index": 0, "name": "residual"}
_LIST_METHODS = {
    "append": {"op": ops.GELU()},
    "extend": {"ops": (ops.GELU(),)},
    "insert": {"index": 0, "op": ops.GELU()},
    "pop": {"index": 0},
    "__getitem__": {"index": 0},
    "__setitem__": {"index": 0, "op": ops.GELU()},
    "__delitem__": {"index": 0},
    "__add__": {"other": (ops.GELU(),)},
}
FUNCTIONS = {
    **{
        f"Sequential.{name}": called(
            _changed_list(name), functools.partial(dict, given)
        )
        for name, given in _LIST_METHODS.items()
    },
    "with_extra_input_channel": called(
        _with_channel(ops.AddExtraInput, "with_extra_input_channel"),
        lambda: {**_CHANNEL},
    ),
    "with_extra_output_channel": called(
        _with_channel(ops.MakeExtraOutput, "with_extra_output_channel"),
        lambda: {**_CHANNEL, "output_to_caller": True},
    ),
    "ops.FusedOperation": called(
        ops.FusedOperation, lambda: {"basic_ops": (ops.GELU(),)}
    ),
    "OperationFuser.fused": called(
        lambda direction: ops.OperationFuser([ops.GELU()]).fused(direction),
        lambda: {"direction": "forward"},
    ),
    "ops.fuse_windows": without(
        called(
            ops.fuse_windows, lambda: {"ops": [ops.GELU()], "match": lambda ops: None}
        ),
        *("a class", "jnp.float32", "int32"),  # raise their own errors when called
    ),
    "ops.unregister_fusion": called(ops.unregister_fusion, lambda: {"fusion": _fusion}),
    "ops.without_fusions": called(ops.without_fusions, dict),
    **{
        f"ops.{name}.{scan}": called(getattr(kind, scan), lambda: {"ops": [ops.GELU()]})
        for name, kind in vars(ops.fused).items()
        for scan in ("fuse_forward_ops", "fuse_backward_ops")
        if hasattr(kind, scan)
    },
    **{
        f"ops.{split.__name__}": _on_trees(split, lambda: {"params": (_PARAMS,)})
        for split in (ops.split_main_grads, ops.split_fp8_states)
    },
    "ops.merge_main_grads": _on_trees(
        ops.merge_main_grads, lambda: {"weights": _PARAMS, "main_grads": _PARAMS}
    ),
    "ops.merge_fp8_states": _on_trees(
        ops.merge_fp8_states, lambda: {"weights": _PARAMS, "states": _PARAMS}
    ),
    "ops.gradients_of_main_grads": _on_trees(
        ops.gradients_of_main_grads,
        lambda: {"gradients": (_PARAMS,), "main_grads": (_PARAMS,)},
    ),
}
