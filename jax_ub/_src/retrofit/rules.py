"""Rules that assign values to the layers of a model by their paths."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jax_ub._src.errors import UnknownNameError, nearest, shown
from jax_ub._src.fp8.recipes import check_layer_recipe
from jax_ub._src.sharding.layout import resolve_parallel


def read_rules(argument: str, given: Any) -> dict[re.Pattern[str], Any]:
    """Checks and compiles rules, {regular expression: value}; returns {} for None.

    `argument` is their name: "rules", "ub_names" or "fp8".
    """
    if given is not None and not isinstance(given, Mapping):
        raise UnknownNameError(
            f"overlap: {argument} = {shown(given)} is not a dictionary. Pass, for "
            'example, {r".*\\.up": ...} to select layers by path.'
        )
    read = {"rules": _read_kind, "ub_names": _read_name, "fp8": _read_recipe}[argument]
    rules = (given or {}).items()
    return {_compiled(pattern): read(pattern, value) for pattern, value in rules}


def values_by_path(argument: str, given: Any, paths: Collection[str]) -> dict[str, Any]:
    """Returns {path: value of the first pattern that matches it}, of `read_rules`.

    A pattern must match a whole path. Paths without a match are left out.

    Raises:
        UnknownNameError: if a pattern matches no path, or a value is invalid.
    """
    found: dict[str, Any] = {}
    for pattern, value in read_rules(argument, given).items():
        matched = list(filter(pattern.fullmatch, paths))
        if not matched:
            name, kind = f"{shown(pattern.pattern)} of {argument}", "overlapped"
            if argument == "rules":
                name, kind = f"the rule {shown(pattern.pattern)}", "linear"
            raise UnknownNameError(
                f"overlap: {name} matches no {kind} layer of the model; a rule must "
                f"match a whole path. {nearest(pattern.pattern, paths)}"
            )
        for path in matched:
            found.setdefault(path, value)
    return found


def _read_kind(pattern, kind):
    return None if kind is None else resolve_parallel("overlap", kind)


def _read_name(pattern, name):
    if not isinstance(name, str):
        raise UnknownNameError(
            f"overlap: ub_names = {{{shown(pattern)}: {shown(name)}}} has a name of "
            f'type {type(name).__name__}. Pass the name of a layer, such as "fc1".'
        )
    return name


def _read_recipe(pattern, recipe):
    check_layer_recipe("overlap", recipe)
    return recipe


def _compiled(pattern):
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UnknownNameError(
            f"overlap: the rule {shown(pattern)} is not a regular expression: {error}. "
            "Escape literal paths with re.escape(path)."
        ) from error
