"""Linears of both kinds on global arrays, with what they should give."""

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from operands import small_integers

ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")
MODES = ("column", "row")
METHODS = ("auto", "direct", "ring_exchange", "pipeline", "external", "xla")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of one mode lie over the ranks."""

    x: P
    w: P
    y: P


LAYOUTS = {
    "column": Layout(ROWS, P(None, "tp"), FEATURES),
    "row": Layout(FEATURES, P("tp"), ROWS),
}


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Operands of a linear, the gradient of its result, and what gradients add to."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array
    main_grad: jax.Array
    residual: jax.Array


def arrays(num_ranks: int, dtype="float32", make=small_integers, batch=(2,)) -> Arrays:
    """Global arrays whose rows and features are multiples of the ranks, but of no 8."""
    rows, k, n = 3 * num_ranks, 5 * num_ranks, 7 * num_ranks
    return Arrays(
        make(0, (*batch, rows, k), dtype),
        make(1, (k, n), dtype),
        make(2, (*batch, rows, n), dtype),
        make(3, (k, n), "float32"),
        make(4, (*batch, rows, k), dtype),
    )


def wide(array) -> np.ndarray:
    """In f32 and in numpy: exact on small integers, and nothing to compile."""
    return np.asarray(array, np.float32)


def dgrad(a: Arrays) -> np.ndarray:
    """The gradient of x, in f32."""
    return wide(a.dy) @ wide(a.w).T


def wgrad(a: Arrays) -> np.ndarray:
    """The gradient of the kernel, in f32."""
    rows = wide(a.x).reshape(-1, a.x.shape[-1])
    return rows.T @ wide(a.dy).reshape(-1, a.dy.shape[-1])


def bias_grad(a: Arrays) -> np.ndarray:
    """The gradient of a bias, in f32."""
    return wide(a.dy).reshape(-1, a.dy.shape[-1]).sum(0)
