"""Reads the settings of named overlaps (`ub_cfgs`), and completes them with defaults.

`from_te` reads the `tp-comm-overlap` files of Megatron-LM, NeMo and Transformer Engine.
The functions modify neither their arguments nor a table, so every mode starts from the
same defaults. In Transformer Engine the first mode's overrides leak into the second.
"""

import importlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jax_ub._src.config.overlap_config import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    OverlapConfig,
    UserBufferQuantizationMode,
    read_entry,
    split_name,
    with_known_pass,
)
from jax_ub._src.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.methods import Method
from jax_ub._src.parallel import (
    COLUMN,
    DGRAD,
    FPROP,
    PASSES,
    ROW,
    WGRAD,
    CommOverlapType,
    mode_of,
)

_AG, _RS = CommOverlapType.AG, CommOverlapType.RS

_LAYERS = {"qkv": COLUMN, "fc1": COLUMN, "proj": ROW, "fc2": ROW}
_NOT_BULK = tuple(method for method in Method if method is not Method.BULK)
# The default method and the valid methods for each pass and collective, which is an
# all-gather or a reduce-scatter. Where Transformer Engine uses method "bulk", the
# default is "bulk" instead.
_METHODS = {
    (FPROP, _AG): (Method.RING_EXCHANGE, _NOT_BULK),
    (FPROP, _RS): (Method.PIPELINE, _NOT_BULK),
    # Method "bulk" all-gathers x during the dgrad GEMM. The other methods all-gather
    # dy, an operand of the dgrad GEMM.
    (DGRAD, _AG): (Method.RING_EXCHANGE, tuple(Method)),
    (DGRAD, _RS): (Method.PIPELINE, _NOT_BULK),
    # This all-gather collects the operand of a wgrad GEMM. Method "direct" reads the
    # peers' shards within the GEMM. Method "external" all-gathers the shards before the
    # GEMM.
    (WGRAD, _AG): (
        Method.EXTERNAL,
        (Method.AUTO, Method.DIRECT, Method.EXTERNAL, Method.XLA),
    ),
    # Method "bulk" reduce-scatters dx during the wgrad GEMM. No other method does this.
    (WGRAD, _RS): (Method.BULK, (Method.BULK,)),
}


def _predefined(parallel, direction):
    default = mode_of(parallel, True).communications(direction)[0]
    method, _ = _METHODS[direction, default.comm_type]
    return Method.BULK if default.is_bulk else method, default.comm_type


# Maps the predefined names of overlaps to (default method, collective). The name
# "qkv_fprop" stands for the forward pass of layer "qkv".
NAMES = {
    f"{layer}_{direction}": _predefined(parallel, direction)
    for layer, parallel in _LAYERS.items()
    for direction in PASSES
}


def method_defaults(
    method: Method, comm_type: CommOverlapType, num_ranks: int
) -> dict[str, object]:
    """Returns the default settings of a method, as in Transformer Engine.

    Args:
        method: the method. Methods that Transformer Engine lacks get the thread blocks
            of "ring_exchange", whose copy engines need none.
        comm_type: the communication type. Only gathered operands are FP8 by default.
        num_ranks: P, the number of chunks in a ring.
    """
    sends_by_kernel = method in (Method.PIPELINE, Method.BULK, Method.EXTERNAL)
    return {
        "num_sm": 16 if sends_by_kernel else 1,
        "cga_size": 2 if sends_by_kernel else 1,
        "set_sm_margin": sends_by_kernel,
        "num_splits": num_ranks if method is Method.RING_EXCHANGE else 4,
        "aggregate": False,
        "use_ce": True,
        "fp8_buf": comm_type is _AG,
        "wire_dtype": None,
        "comm_priority": HIGHEST_PRIORITY,
        "gemm_priority": LOWEST_PRIORITY,
        "pipeline_rs_overlap_first_gemm": False,
    }


# Methods of GEMM + reduce-scatter that can send partial sums as FP8.
_FP8_SUMS = (Method.PIPELINE, Method.RING_EXCHANGE, Method.AUTO, Method.XLA)
# Settings that only some overlaps read: {setting: (methods, collectives)}. In all other
# overlaps, the setting must have its default.
_ONLY = {
    "num_splits": ((Method.PIPELINE,), (_AG, _RS)),
    "aggregate": ((Method.RING_EXCHANGE,), (_AG,)),
    "use_ce": (
        (Method.RING_EXCHANGE, Method.PIPELINE, Method.BULK, Method.EXTERNAL),
        (_AG, _RS),
    ),
    "pipeline_rs_overlap_first_gemm": ((Method.PIPELINE,), (_RS,)),
}
# The overlaps in which Transformer Engine reads a setting: {setting: (methods,
# collectives)}. In all other overlaps it ignores the setting, and `from_te` removes it.
_READ_BY = {
    **_ONLY,
    "use_ce": ((Method.RING_EXCHANGE,), (_AG, _RS)),
    "fp8_buf": (_NOT_BULK, (_RS,)),
}
# Settings that select method "auto" for all forward passes and dgrads, but not for
# wgrads. With "auto", the dgrad of a column-parallel layer reduce-scatters dx, so the
# wgrad has nothing to communicate. The wgrad of a row-parallel layer keeps its default
# method.
AUTOMATIC = {name: {"method": "auto"} for name in NAMES if split_name(name)[1] != WGRAD}
_IGNORED = (
    "ub.overlap_config.from_te leaves out what Transformer Engine accepts and ignores."
)


def read_entries(ub_cfgs: object) -> dict[str, dict[str, object]]:
    """Returns the argument `ub_cfgs` as a checked dictionary: {name: settings}.

    Checks each entry by itself, and that no two names mean the same pass. `resolve`
    checks how the settings of different passes depend on each other.
    """
    if ub_cfgs is None:
        return {}
    if not isinstance(ub_cfgs, Mapping):
        raise ConfigurationTypeError(
            f"ub_cfgs = {shown(ub_cfgs)} is not a dictionary. Pass one of names, such "
            'as {"proj_fprop": {"method": "ring_exchange"}}.'
        )
    entries = {}
    for name, entry in ub_cfgs.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationTypeError(
                f"ub_cfgs has the key {shown(name)}, but names are non-empty strings. "
                'Pass a name such as "qkv_fprop".'
            )
        entries[name] = read_entry(name, entry)
        if name not in NAMES and "comm_type" not in entries[name]:
            hint = nearest(with_known_pass(name), NAMES)
            raise UnknownNameError(
                f"ub_cfgs[{shown(name)}] is an unknown overlap. {hint} "
                'Other names must configure "comm_type": "AG" or "RS".'
            )
    _check_one_name_per_pass(entries)
    return entries


def _check_one_name_per_pass(entries):
    """Raises an error if two names configure the same layer's forward pass.

    A name without a pass means the forward pass: "qkv" means the same as "qkv_fprop".
    """
    for name in entries:
        full = f"{name}_{FPROP}"
        if split_name(name) == (name, FPROP) and full in {*NAMES, *entries}:
            raise ConfigurationError(
                f"ub_cfgs[{shown(name)}] configures the forward pass of layer "
                f"{shown(name)}, as {shown(full)} does, which takes precedence. Leave "
                f"{shown(name)} out, and configure each pass separately."
            )


def resolve(
    entries: Mapping[str, Mapping[str, object]],
    num_ranks: int,
    mode: UserBufferQuantizationMode,
) -> dict[str, OverlapConfig]:
    """Completes the user's settings of overlaps, such as "qkv_fprop", by the defaults.

    If the dgrad of "qkv" or "fc1" is not "bulk", it reduce-scatters dx itself. Its
    wgrad, which would reduce-scatter dx otherwise, is then left out of the result.

    Returns:
        The configurations by name, with Transformer Engine's names first, in its order.
    """
    resolved: dict[str, OverlapConfig] = {}
    for name in [*NAMES, *(name for name in entries if name not in NAMES)]:
        if _is_displaced(name, entries, resolved):
            continue
        entry = entries.get(name, {})
        method, comm_type = _method_and_type(name, entry)
        _check_method(name, method, comm_type, entry)
        defaults = method_defaults(method, comm_type, num_ranks)
        merged: dict[str, Any] = {**defaults, **entry}
        merged.update(method=method.value, comm_type=comm_type)
        config = OverlapConfig(**merged)
        _check_settings(name, config, defaults, num_ranks, mode)
        resolved[name] = config
    _check_pairs(resolved)
    return resolved


def _is_displaced(name, entries, resolved):
    """Returns whether `name` is a wgrad whose reduce-scatter the dgrad performs."""
    if NAMES.get(name) != (Method.BULK, _RS):  # not the wgrad of a column layer
        return False
    dgrad = f"{split_name(name)[0]}_{DGRAD}"
    method = resolved[dgrad].method
    if method == Method.BULK.value:
        return False
    if name in entries:
        raise ConfigurationError(
            f'ub_cfgs has {shown(name)}, but {shown(dgrad)} with method "{method}" '
            "reduce-scatters dx itself, so that the wgrad has nothing to "
            f"communicate. Leave {shown(name)} out, or give {shown(dgrad)} the "
            'method "bulk".'
        )
    return True


def _method_and_type(
    name: str, entry: Mapping[str, Any]
) -> tuple[Method, CommOverlapType]:
    """Returns the method and the collective of an overlap with these settings."""
    if name in NAMES:
        default, comm_type = NAMES[name]
    else:
        comm_type = entry["comm_type"]
        default, _ = _METHODS[split_name(name)[1], comm_type]
    method = Method(entry.get("method", default))
    # The dgrad of a column-parallel layer overlaps with an all-gather only if its
    # method is "bulk". With any other method it overlaps with the reduce-scatter of dx.
    if default is Method.BULK and method is not Method.BULK:
        comm_type = _RS
    return method, comm_type


def _check_method(name, method, comm_type, entry):
    if entry.get("comm_type", comm_type) is not comm_type:
        raise ConfigurationError(
            f'ub_cfgs[{shown(name)}]: with method "{method.value}", comm_type is '
            f'"{comm_type.value}", not "{entry["comm_type"].value}". Leave comm_type '
            "and is_reduce_scatter out."
        )
    direction = split_name(name)[1]
    _, possible = _METHODS[direction, comm_type]
    if method not in possible:
        raise ConfigurationError(
            f"ub_cfgs[{shown(name)}]: a {direction} with {comm_type.value} cannot use "
            f'method "{method.value}". Use one of {_quoted(possible)}.'
        )


def _check_settings(name, config, defaults, num_ranks, mode):
    """Raises an error if an overlap has a setting that it does not support."""

    def error(key, reason):
        found = f"ub_cfgs[{shown(name)}][{shown(key)}] = {shown(config[key])}"
        return ConfigurationError(f"{found}{reason}")

    method, comm_type = Method(config.method), config.comm_type
    for key, (only, comm_types) in _ONLY.items():
        fits = method in only and comm_type in comm_types
        if fits or config[key] == defaults[key]:
            continue
        where = f" ({comm_types[0].value})" if len(comm_types) == 1 else ""
        raise error(
            key,
            f' has no effect with method "{method.value}" ({comm_type.value}), only '
            f"with {_quoted(only)}{where}. Leave it out; {_IGNORED}",
        )
    is_fp8 = mode is UserBufferQuantizationMode.FP8
    if comm_type is _AG and is_fp8 and not config.fp8_buf:
        reason = ", but the gathered operand of an FP8 GEMM is FP8. Leave it out; "
        raise error("fp8_buf", f"{reason}{_IGNORED}")
    sends_fp8_sums = config.wire_dtype is not None or (is_fp8 and config.fp8_buf)
    if comm_type is _RS and sends_fp8_sums and method not in _FP8_SUMS:
        reason = (
            f', but method "{method.value}" sends no partial sums. Use one of '
            f"{_quoted(_FP8_SUMS)}."
        )
        if method is Method.BULK:
            reason = (
                ", but bulk sums the result of a GEMM, and sums are never computed in "
                'FP8. Leave it out, or use "pipeline" for the dgrad.'
            )
        raise error("fp8_buf" if config.wire_dtype is None else "wire_dtype", reason)
    if config.aggregate and num_ranks % 2:
        raise error(
            "aggregate",
            f" pairs the ranks, but there are {num_ranks}. Leave it out, or use an "
            "even tp_size.",
        )


def _quoted(methods):
    return ", ".join(f'"{method.value}"' for method in methods)


def _check_pairs(resolved):
    """Raises an error if a layer's dgrad is "bulk" but its wgrad is not, or vice versa.

    A bulk dgrad all-gathers x for the wgrad, which reduce-scatters the dgrad's dx.
    """
    for name, config in resolved.items():
        layer, direction = split_name(name)
        paired = {DGRAD: f"{layer}_{WGRAD}", WGRAD: f"{layer}_{DGRAD}"}.get(direction)
        if paired is None or config.method != Method.BULK.value:
            continue
        other = resolved.get(paired)
        if other is None or other.method != Method.BULK.value:
            raise ConfigurationError(
                f'ub_cfgs[{shown(name)}] is "bulk", but {shown(paired)} is not: the '
                "dgrad all-gathers x for the wgrad, and the wgrad reduce-scatters dx. "
                'Configure both, with comm_type "AG" for the dgrad and "RS" for the '
                "wgrad, or neither."
            )


def from_te(source: Mapping | str | os.PathLike) -> dict[str, dict[str, object]]:
    """Reads Megatron's `tp-comm-overlap` settings for `initialize_ub(ub_cfgs=...)`.

    Leaves out keys that Transformer Engine accepts and ignores, such as `fp8_buf` of an
    all-gather. Also leaves out names whose value is None: NeMo's recipes use None for a
    wgrad that has nothing to communicate, because its dgrad reduce-scatters. All other
    keys are checked and kept.

    Transformer Engine: `ub_cfgs`. Megatron-LM: `--tp-comm-overlap-cfg`.

    Args:
        source: a dictionary, the text of a YAML file, or the path of a YAML file.

    Returns:
        A dictionary of keys and values for each name.

    Raises:
        UnknownNameError: if a name, a key or a method is unknown.
        ConfigurationError: if a value is out of range, a key is repeated, or the file
            does not exist or is not valid YAML.
        ConfigurationTypeError: if `source` is not a dictionary of dictionaries.
        ImportError: if YAML is given and PyYAML is not installed.
    """
    found = source if isinstance(source, Mapping) else _read_yaml(source)
    unset = []
    if isinstance(found, Mapping):
        unset = [name for name, entry in found.items() if entry is None]
        # An entry without settings is None in YAML, which `read_entries` rejects. An
        # empty dict replaces None, so that `read_entries` checks only the entry's name.
        # The result omits these entries.
        found = {**found, **{name: {} for name in unset}}
    return {
        name: _without_ignored_keys(name, entry)
        for name, entry in read_entries(found).items()
        if name not in unset
    }


def _without_ignored_keys(name, entry):
    method, comm_type = _method_and_type(name, entry)

    def is_read(key):
        only, comm_types = _READ_BY.get(key, (Method, CommOverlapType))
        return method in only and comm_type in comm_types

    return {key: value for key, value in entry.items() if is_read(key)}


def _read_yaml(source):
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise ImportError(
            "jax_ub.overlap_config.from_te: PyYAML is not installed. Install it (pip "
            "install pyyaml), or pass a dictionary."
        ) from error
    if not isinstance(source, str | os.PathLike):
        raise ConfigurationTypeError(
            f"overlap_config.from_te: source = {shown(source)} is not supported. "
            "Pass a dictionary, YAML text, or the path of a YAML file."
        )
    if isinstance(source, os.PathLike) or "\n" not in source and ":" not in source:
        return _parse(yaml, _read_file(source))
    found = _parse(yaml, source)
    # YAML parses a file path as a plain string, even if the path contains a colon,
    # because a mapping needs a space after the colon.
    is_path = isinstance(found, str) and "\n" not in source
    return _parse(yaml, _read_file(source)) if is_path else found


def _read_file(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: the file is not UTF-8
        raise ConfigurationError(
            f"overlap_config.from_te: cannot read {shown(str(path))}: "
            f"{getattr(error, 'strerror', None) or error}. Pass the path of a YAML "
            "file, its text, or a dictionary."
        ) from error


def _parse(yaml, text):
    try:
        _check_repeated_keys(yaml, text)
        return yaml.safe_load(text)
    except ConfigurationError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"overlap_config.from_te: the source is not YAML: {str(error)[:500]}. Pass "
            "a dictionary of names, or YAML text or a file that contains one."
        ) from error


def _check_repeated_keys(yaml, text):
    """Raises an error if a mapping in the YAML text has the same key twice.

    PyYAML would silently use its last value.
    """
    nodes = [yaml.compose(text, Loader=yaml.SafeLoader)]
    for node in nodes:
        lines: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if value not in nodes:  # aliases refer to the node of their anchor
                nodes.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue  # several merge keys are valid: PyYAML applies all of them
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigurationError(
                    f"overlap_config.from_te: line {line} repeats {shown(key.value)} "
                    f"of line {lines[key.value]}. Keep one of them."
                )
            lines[key.value] = line
