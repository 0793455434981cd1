"""Checks options that many layers share, such as `dtype` and `kernel_init`.

`checks` has those of arrays and sizes. Methods and mesh axes are checked where they are
used.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import jax.numpy as jnp
from jax import lax

from jax_ub._src import checks
from jax_ub._src.errors import (
    ConfigurationError,
    UnknownArgumentError,
    UnknownNameError,
    nearest,
    shown,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _ConstructorSignature:
    """Makes `inspect.signature` of a layer class show the arguments of `__init__`."""

    def __get__(self, instance, layer):
        if instance is not None:
            raise AttributeError  # the signature of a callable object is another one
        constructor = inspect.signature(layer.__init__)
        parameters = list(constructor.parameters.values())[1:]  # without self
        return constructor.replace(parameters=parameters)


class KeywordsChecked:
    """Base class of layers that reject unknown keyword arguments with a hint.

    An unknown keyword argument raises `UnknownArgumentError`, which is a `TypeError`.
    A constructor with `**options` checks these by `check_names`.
    """

    _op_prefix: ClassVar[str] = ""
    __signature__ = _ConstructorSignature()

    def __new__(cls, *args: Any, **keywords: Any):
        # Rejects unknown keyword arguments here, because the error that `__init__`
        # raises has no hint. This comment is not a docstring, because Sphinx would
        # print a docstring of `__new__` on the page of every layer.
        if keywords and not inspect.getfullargspec(cls.__init__).varkw:
            op = f"{cls._op_prefix}{cls.__name__}"
            check_names(op, keywords, named_parameters(cls))
        return super().__new__(cls)


class FixedArguments:
    """Base class of layers that reject assignments to their constructor arguments.

    An assignment after the constructor raises an error, because it would have no
    effect. A user's subclass with its own constructor may use all names.
    """

    # The arguments that may be assigned later, because each call reads them.
    _settable: ClassVar[frozenset[str]]
    # Boolean arguments whose attribute holds an array, such as "main_grad". Only the
    # assignment of a bool is rejected.
    _flags: ClassVar[frozenset[str]] = frozenset()
    # Maps the name of an attribute to the part of the error that says what to do
    # instead of assigning it.
    _set_elsewhere: ClassVar[dict[str, str]] = {}
    # Names of arguments that the constructor accepts in `**options`.
    _unpacked: ClassVar[frozenset[str]] = frozenset()
    # Names of arguments that cannot be assigned. `__init_subclass__` computes them.
    _fixed: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        own = vars(cls)
        if "_settable" in own:
            names = cls._unpacked.union(named_parameters(cls), cls._set_elsewhere)
            cls._fixed = names - cls._settable
        elif "__init__" in own:
            cls._fixed = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        is_argument = name not in self._flags or isinstance(value, bool)
        if name in self._fixed and is_argument:
            op = type(self).__name__
            fix = self._set_elsewhere.get(name, f"Create another {op} with {name}=.")
            raise ConfigurationError(
                f"{op}: {name} = {shown(value)} is set after the constructor, which "
                f"alone reads it. {fix}"
            )
        super().__setattr__(name, value)

    def _store(self, **arguments: Any) -> None:
        """Sets attributes in a constructor, without the check of `__setattr__`."""
        for name, value in arguments.items():
            super().__setattr__(name, value)


def keywords_checked(function: _Function) -> _Function:
    """Decorates a function, so that errors about unknown keywords name similar ones."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args, **keywords):
        if not keywords.keys() <= known.keys():
            check_names(function.__name__, keywords, known)
        return function(*args, **keywords)

    return cast(_Function, checked)


def named_parameters(layer: type) -> list[str]:
    """Returns the names of the constructor's parameters that may be passed by name."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    constructor = inspect.signature(layer.__init__)  # type: ignore[misc]
    names = [p.name for p in constructor.parameters.values() if p.kind in named]
    return [name for name in names if name != "self" and not name.startswith("_")]


_ADDS_BIAS = "Leave it out: the layer adds its bias."
_SIZES_OF_X = "Leave it out: the layer takes these sizes from x."
_SEPARATE_DRAWS = "Leave it out: each rank draws separate random numbers."
# Maps the arguments of Transformer Engine's layers to the corresponding arguments of
# jax_ub, or to the part of the error that says what to do instead.
_OF_TRANSFORMER_ENGINE: dict[str, tuple[str, ...] | str] = {
    "attention_dropout": ("dropout_rate",),
    "attn_input_format": "Leave it out: x has shape [batch, tokens, features].",
    "attn_mask_type": ("is_causal",),
    "bias": ("use_bias",),
    "delay_wgrad_compute": "Leave it out: XLA schedules the weight gradients.",
    "device": "Leave it out: the mesh has the devices.",
    "eps": ("epsilon",),
    "fuse_qkv_params": "Leave it out: query, key and value share one all-gather.",
    "fuse_wgrad_accumulation": ("main_grad", "accumulate_into_main_grad"),
    "get_rng_state_tracker": _SEPARATE_DRAWS,
    "hidden_size": ("in_features",),
    "init_method": ("kernel_init",),
    "kv_channels": ("qkv_features",),
    "layer_number": "Leave it out: no layer depends on its number.",
    "layernorm_epsilon": ("epsilon",),
    "micro_batch_size": _SIZES_OF_X,
    "num_attention_heads": ("num_heads",),
    "num_gqa_groups": ("num_kv_heads",),
    "parallel_mode": ("parallel", "tensor_parallel_mode"),
    "params_dtype": ("param_dtype",),
    "qk_norm_before_rope": "Leave it out: norms precede the rotary embeddings.",
    "return_bias": _ADDS_BIAS,
    "rng_state_tracker_function": _SEPARATE_DRAWS,
    "self_attn_mask_type": ("is_causal",),
    "seq_length": _SIZES_OF_X,
    "set_parallel_mode": (
        "Leave it out: the linears of this layer are always parallel."
    ),
    "tensor_parallel_group": ("axis_name",),
    "tp_group": ("axis_name",),
    "tp_size": ("mesh", "axis_name"),
    "ub_tp_comm_overlap": "Leave it out: sequence-parallel layers overlap by default.",
    "window_size": ("attention_fn",),
}
_OF_MEGATRON: dict[str, tuple[str, ...] | str] = {
    "gather_output": "Leave it out: jax.reshard gathers the result.",
    "input_is_parallel": "Leave it out: the layer reshards x if necessary.",
    "skip_bias_add": _ADDS_BIAS,
    "tp_comm_buffer_name": ("ub_name",),
}
_OF_OTHERS = {"axis": ("axis_name",), "num_kv_heads": ("num_gqa_groups",)}
_COUNTERPARTS = _OF_TRANSFORMER_ENGINE | _OF_MEGATRON | _OF_OTHERS


def check_names(op: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises an `UnknownArgumentError` for the first name in `given` not in `known`."""
    known = list(known)
    for name in given:
        if name in known:
            continue
        hint = _COUNTERPARTS.get(name, ())
        if not isinstance(hint, str):
            hint = nearest(next((each for each in hint if each in known), name), known)
        text = f"{op}: it has no argument {shown(name)}"
        if name in _OF_TRANSFORMER_ENGINE:
            text += ", which is Transformer Engine's"
        elif name in _OF_MEGATRON:
            text += ", which is Megatron-LM's"
        raise UnknownArgumentError(f"{text}. {hint}")


def check(op: str, **options: Any) -> None:
    """Checks the values of a layer's options, such as `dtype` and `kernel_init`.

    `_CHECKS` has a check for each option name. Options with other names are ignored.
    """
    for name, value in options.items():
        if name in _CHECKS:
            _CHECKS[name](op, name, value)


def _is_float_dtype(value):
    dtype = None if checks.is_array(value) else checks.dtype_of(value)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_metadata(value):
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_precision(value):
    """Returns whether `jax.lax.dot_general` accepts `value` as its precision."""
    if isinstance(value, lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return True
    if isinstance(value, str):
        return _names_precision(value) or value in lax.DotAlgorithmPreset.__members__
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    if all(isinstance(each, str) for each in value):
        return all(map(_names_precision, value))
    return all(isinstance(each, lax.Precision) for each in value)


def _names_precision(name):
    try:
        lax.Precision(str(name))  # its error has the repr of `name`, which may fail
    except ValueError:
        return False
    return True


check_function = checks.option_check(callable, "a function", "Pass one.")
check_dtype = checks.option_check(
    _is_float_dtype,
    "a floating-point dtype",
    "Pass one, for example jnp.bfloat16.",
)
_check_name = checks.option_check(
    lambda value: isinstance(value, str),
    'the name of a layer, such as "qkv"',
    "Pass a string, or leave the argument out.",
    UnknownNameError,
)
_check_metadata = checks.option_check(
    _is_metadata,
    "a dictionary of names and values",
    "Pass one, or leave the argument out.",
)
_check_rngs = checks.option_check(
    lambda value: callable(getattr(value, "params", None)),
    "an object with keys for parameters",
    "Pass, for example, nnx.Rngs(0).",
)


def _or_none(check_value: Callable[[str, str, Any], None]):
    def check_option(op, name, value):
        if value is not None:
            check_value(op, name, value)

    return check_option


check_precision = _or_none(
    checks.option_check(
        _is_precision,
        "a precision",
        'Pass a jax.lax.Precision or its name, such as "highest", or None.',
    )
)


_FLAGS = [
    "accumulate_into_main_grad",
    "approximate",
    "backward_quantized",
    "broadcast_dropout",
    "forward_quantized",
    "in_place",
    "is_causal",
    "main_grad",
    "normalize_qk",
    "return_layernorm_output",
    "sequence_parallel",
    "tensor_parallel",
    "use_bias",
    "zero_centered_gamma",
]
_CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    **dict.fromkeys(("param_dtype", "grad_dtype"), check_dtype),
    **dict.fromkeys(("dtype", "preferred_element_type"), _or_none(check_dtype)),
    **dict.fromkeys(("kernel_init", "bias_init", "promote_dtype"), check_function),
    "scale_init": _or_none(check_function),
    **dict.fromkeys(("kernel_metadata", "bias_metadata"), _check_metadata),
    "precision": check_precision,
    "rngs": _check_rngs,
    "ub_name": _or_none(_check_name),
    "ub_comm_name": _or_none(_check_name),
    **dict.fromkeys(
        ("deterministic", "reduce_in_backward"), _or_none(checks.check_flag)
    ),
    **dict.fromkeys(_FLAGS, checks.check_flag),
}
