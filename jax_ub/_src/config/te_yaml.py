"""Reads the `tp-comm-overlap` files of Megatron-LM, NeMo and Transformer Engine."""

import importlib
import os
import pathlib
from collections.abc import Mapping

from jax_ub._src.config.overlap_config import CommOverlapType
from jax_ub._src.config.resolve import ONLY, method_and_type, read_entries
from jax_ub._src.errors import ConfigurationError, ConfigurationTypeError, shown
from jax_ub._src.methods import Method

# Keys that Transformer Engine ignores in some overlaps, with the methods and
# collectives for which it reads them, in the form of `ONLY`.
_READ_BY = {
    **ONLY,
    "use_ce": ((Method.RING_EXCHANGE,), None),
    "fp8_buf": (tuple(set(Method) - {Method.BULK}), True),
}


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
        # `read_entries` rejects None. It gets an empty entry instead, so that it still
        # checks the name. The result omits these entries.
        found = {**found, **{name: {} for name in unset}}
    return {
        name: _without_ignored_keys(name, entry)
        for name, entry in read_entries(found).items()
        if name not in unset
    }


def _without_ignored_keys(name, entry):
    method, comm_type = method_and_type(name, entry)

    def is_read(key):
        only, scatters = _READ_BY.get(key, (Method, None))
        return method in only and scatters in (None, comm_type is CommOverlapType.RS)

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
    # A path is a plain string to YAML, even with a colon, because a mapping needs a
    # space after its colon.
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
        _check_keys(yaml, text)
        return yaml.safe_load(text)
    except ConfigurationError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"overlap_config.from_te: the source is not YAML: {str(error)[:500]}. Pass "
            "a dictionary of names, or YAML text or a file that contains one."
        ) from error


def _check_keys(yaml, text):
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
