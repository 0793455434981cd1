"""Rules that select the layers of a model by their paths."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jax_ub._src.errors import UnknownNameError, nearest, shown


def values_by_path(argument: str, given: Any, paths: Collection[str]) -> dict[str, Any]:
    """Maps layer paths to the values that a dictionary of patterns assigns."""
    found: dict[str, Any] = {}
    for pattern, value in check_rules(argument, given).items():
        described = f"{shown(pattern)} of {argument}"
        for path in matching_paths(described, pattern, paths, "overlapped"):
            found.setdefault(path, value)
    return found


def matching_paths(
    described: str, pattern: str, paths: Collection[str], kind: str = "linear"
) -> list[str]:
    """Returns the paths that a pattern matches; raises an error if there is none."""
    matched = list(filter(compile_rule(pattern).fullmatch, paths))
    if not matched:
        raise UnknownNameError(
            f"overlap: {described} matches no {kind} layer of the model; a rule must "
            f"match a whole path. {nearest(pattern, paths)}"
        )
    return matched


def check_rules(argument: str, rules: Any) -> Mapping:
    """Checks that `rules` is a dictionary; returns an empty one for None."""
    if rules is not None and not isinstance(rules, Mapping):
        raise UnknownNameError(
            f"overlap: {argument} = {shown(rules)} is not a dictionary. Pass, for "
            'example, {r".*\\.up": ...} to select layers by path.'
        )
    return rules or {}


def check_layer_name(pattern: str, name: Any) -> None:
    """Raises an error unless the value `name` of `ub_names` is a string."""
    if not isinstance(name, str):
        raise UnknownNameError(
            f"overlap: ub_names = {{{shown(pattern)}: {shown(name)}}} has a name of "
            f'type {type(name).__name__}. Pass the name of a layer, such as "fc1".'
        )


def compile_rule(pattern: str) -> re.Pattern[str]:
    """Compiles the regular expression that selects layers by their path."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UnknownNameError(
            f"overlap: the rule {shown(pattern)} is not a regular expression: {error}. "
            "Escape literal paths with re.escape(path)."
        ) from error
