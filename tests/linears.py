"""Column and row linear layers on global arrays, with their expected results."""

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
    """The specs of the arrays of one parallel mode."""

    x: P
    w: P
    y: P


LAYOUTS = {
    "column": Layout(ROWS, P(None, "tp"), FEATURES),
    "row": Layout(FEATURES, P("tp"), ROWS),
}


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Operands of a linear layer, the gradient of its result, and main_grads."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array
    main_grad: jax.Array
    residual: jax.Array


def arrays(num_ranks: int, dtype="float32", make=small_integers, batch=(2,)) -> Arrays:
    """Returns global arrays whose sizes are multiples of the ranks, but not of 8."""
    rows, k, n = 3 * num_ranks, 5 * num_ranks, 7 * num_ranks
    return Arrays(
        make(0, (*batch, rows, k), dtype),
        make(1, (k, n), dtype),
        make(2, (*batch, rows, n), dtype),
        make(3, (k, n), "float32"),
        make(4, (*batch, rows, k), dtype),
    )


def wide(array) -> np.ndarray:
    """Converts an array to f32 in numpy, exact for small integers."""
    return np.asarray(array, np.float32)


def dgrad(a: Arrays) -> np.ndarray:
    """Computes the gradient of x in f32."""
    return wide(a.dy) @ wide(a.w).T


def wgrad(a: Arrays) -> np.ndarray:
    """Computes the gradient of the kernel in f32."""
    rows = wide(a.x).reshape(-1, a.x.shape[-1])
    return rows.T @ wide(a.dy).reshape(-1, a.dy.shape[-1])


def bias_grad(a: Arrays) -> np.ndarray:
    """Computes the gradient of a bias in f32."""
    return wide(a.dy).reshape(-1, a.dy.shape[-1]).sum(0)
