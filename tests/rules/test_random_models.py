"""Seeded random stacks of layers: any sizes, ranks, methods and ways to shard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import dp_tp_mesh, on_ranks

import jax_ub as ub

pytestmark = pytest.mark.slow

METHODS = (None, "direct", "ring_exchange", "pipeline", "external", "xla")
WHOLE_KERNEL = {None: P(), "column": P(None, "tp"), "row": P("tp")}


class RandomModel:
    """Column-row pairs, and plain layers between them, with biases."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.num_ranks = int(self.rng.integers(1, 7))
        self.num_groups = 2 if self.num_ranks <= 4 else 1
        self.sequence_parallel = bool(self.rng.integers(2))
        self.kinds = []
        for _ in range(2):
            self.kinds += [None] * int(self.rng.integers(2)) + ["column", "row"]
        self.methods = [METHODS[i] for i in self.rng.integers(0, len(METHODS), 9)]

    def operands(self):
        size = lambda: int(self.rng.integers(1, 12))  # noqa: E731
        widths = [size()]
        for kind in self.kinds:
            widths.append(size() * (self.num_ranks if kind == "column" else 1))
        rows = size() * self.num_ranks
        x = small_integers(0, (self.num_groups * size(), rows, widths[0]))
        layers = [
            (small_integers(i, (k, n)), small_integers(i + 50, (n,)))
            for i, (k, n) in enumerate(zip(widths, widths[1:], strict=False))
        ]
        return x, layers

    def on_mesh(self, check_vma):
        def run(x, layers):
            for kind, method, (w, b) in zip(
                self.kinds, self.methods, layers, strict=False
            ):
                x = ub.linear(
                    x,
                    w,
                    b,
                    parallel=kind,
                    axis_name="tp",
                    sequence_parallel=self.sequence_parallel,
                    method=method,
                )
            return x

        x = P("dp", "tp") if self.sequence_parallel else P("dp")
        layers = [
            (WHOLE_KERNEL[kind], P("tp") if kind == "column" else P())
            for kind in self.kinds
        ]
        mesh = dp_tp_mesh(self.num_groups, self.num_ranks)
        return on_ranks(run, mesh, (x, layers), x, check_vma=check_vma)


def plain(x, layers):
    for w, b in layers:
        x = x @ w + b
    return x


@pytest.mark.parametrize("seed", range(8))
def test_values_and_gradients_are_exact(seed):
    model = RandomModel(seed)
    x, layers = model.operands()

    def loss(function):
        return lambda x, layers: jnp.sum(
            function(x, layers) * small_integers(99, (x.shape[0], 1, 1))
        )

    step = jax.jit(jax.value_and_grad(loss(model.on_mesh(seed % 2 == 0)), (0, 1)))
    expected = jax.jit(jax.value_and_grad(loss(plain), (0, 1)))(x, layers)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) < 2**24
    assert_equal(step(x, layers), expected)
