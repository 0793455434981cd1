"""Selects the layers of an existing model that overlap.

The user's rules select layers by their paths. A layer is left to JAX if a library
intercepts the JAX function that it would call: quantization and LoRA libraries change
what `jax.lax.dot_general` does while a model is traced. Qwix replaces the function's
`__code__`; others replace the module's attribute. An overlapped layer does not call
that function, so it must detect the interception and let JAX compute the product.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jax_ub._src.errors import UnknownNameError, nearest, shown
from jax_ub._src.fp8.recipes import check_layer_recipe
from jax_ub._src.sharding.layout import resolve_parallel


def read_rules(argument: str, given: Any) -> dict[re.Pattern[str], Any]:
    """Checks rules, {regular expression: value}, and compiles their patterns.

    `argument` is their name: "rules", "ub_names" or "fp8". None gives {}.
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
    """Returns {path: value of the first rule whose pattern matches the path}.

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
    if kind is None:
        return None
    return resolve_parallel("overlap", f"rules[{shown(pattern)}]", kind)


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


def _code_of(function: Any) -> Any:
    """Returns the code object of a function, which `jax.jit` may have wrapped."""
    return getattr(getattr(function, "__wrapped__", function), "__code__", None)


@dataclasses.dataclass(frozen=True)
class Product:
    """A JAX function such as `jax.lax.dot_general`, recorded when jax_ub is imported.

    A later comparison detects that another library has replaced the function.

    Attributes:
        module: the module or class that has the function as attribute.
        name: the name of the attribute.
        path: the function's qualified name, for messages.
        function: the function at import time.
        code: the function's code object at import time.
    """

    module: Any
    name: str
    path: str
    function: Callable
    code: Any

    def code_interception(self) -> str | None:
        """Returns which code has replaced the function's `__code__`, or None."""
        code = _code_of(self.function)
        if code is self.code:
            return None
        where = f"{shown(code.co_name)} in {code.co_filename}"
        return f"the code of {self.path} is replaced by that of {where}"


def _product(module: Any, path: str) -> Product:
    name = path.rpartition(".")[2]
    function = getattr(module, name)
    return Product(module, name, path, function, _code_of(function))


DOT_GENERAL = _product(lax, "jax.lax.dot_general")
DOT = _product(jnp, "jax.numpy.dot")
EINSUM = _product(jnp, "jax.numpy.einsum")
# The functions that JAX's `dot_general`, `dot` and `einsum` call internally. A library
# can intercept these calls only by replacing the functions' `__code__`.
_INNER = (DOT_GENERAL, _product(Primitive, "jax.extend.core.Primitive.bind"))


def why_intercepted(product: Product, of_layer: Callable | None = None) -> str | None:
    """Returns how a library has replaced a JAX function, or None if none has.

    The text names the replacement of the function, or of one that it calls. A layer
    must not be overlapped then, because the overlapped call would bypass it.

    Args:
        product: the function that the layer would call without overlap.
        of_layer: the function that a layer has stored and calls; None if the layer
            looks up the module's attribute at each call.
    """
    current = getattr(product.module, product.name) if of_layer is None else of_layer
    found: str | None
    if current is not product.function:
        found = f"{product.path} is replaced by {shown(current)}"
    else:
        changed = (each.code_interception() for each in (product, *_INNER))
        found = next(filter(None, changed), None)
    return found and f"{found}, which an overlapped call would bypass"
