"""Detects libraries that intercept the JAX function that a Flax layer would call.

Quantization and LoRA libraries change what `jax.lax.dot_general` does while a model is
traced. Qwix replaces the function's `__code__`; others replace the module's attribute.
An overlapped layer does not call that function, so it must detect the interception and
let JAX compute the product.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jax_ub._src.errors import shown


def _code_of(function: Any) -> Any:
    """Returns the code object of a Python function or of the function under a jit."""
    return getattr(getattr(function, "__wrapped__", function), "__code__", None)


@dataclasses.dataclass(frozen=True)
class Product:
    """A JAX function such as `jax.lax.dot_general`, saved to detect its replacement.

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
        """Returns a text on what has replaced the function's `__code__`, or None."""
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
# Functions that `dot_general`, `dot` and `einsum` call. JAX calls them through its
# internal modules, so a library can intercept these calls only by replacing their
# `__code__`.
_INNER = (DOT_GENERAL, _product(Primitive, "jax.extend.core.Primitive.bind"))


def why_intercepted(product: Product, of_layer: Callable | None = None) -> str | None:
    """Returns how a library has replaced the JAX function `product`, or None.

    It may also have replaced a function that `product` calls. The layer must then call
    `product`, because an overlapped layer would bypass the replacement.

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
