"""Overlapped linear layers as Sequentials, with expected results and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from linears import Arrays, bias_grad, dgrad, wgrad, wide
from programs import tp_mesh
from sequences import FEATURES, ROWS, overlapped

from jax_ub import ops

# The three patterns of overlapped linears. In "scattered", a `ReduceScatter` follows a
# linear without tensor_parallel_mode, which is then row-parallel, with a different bias
# on each rank.
KINDS = ("column", "row", "scattered")


@dataclasses.dataclass(frozen=True)
class Model:
    """A linear layer of one kind, and the specs of its arrays."""

    kind: str
    num_ranks: int
    seq: ops.Sequential
    specs: tuple
    x: P
    y: P

    def on_ranks(self, *, check_vma: bool = True):
        """Returns the layer as a jitted function of global arrays."""
        return jax.shard_map(
            lambda params, x: self.seq(params, x),
            mesh=tp_mesh(self.num_ranks),
            in_specs=(self.specs, self.x),
            out_specs=self.y,
            check_vma=check_vma,
        )


# Names that Transformer Engine configures for the collectives of each kind.
NAMES = {"column": "qkv", "row": "proj", "scattered": "proj"}


def model(kind: str, num_ranks: int, a: Arrays, *, bias=True, **options):
    """Returns a layer for the sizes of `a`; with `name=None` without overlap."""
    (k, n), mode = a.w.shape, None if kind == "scattered" else kind
    name = options.pop("name", NAMES[kind])
    linear = ops.BasicLinear(
        k // num_ranks if mode is None else k,
        n,
        tensor_parallel_mode=mode,
        **overlapped(name, **options),
    )
    kernel = P(None, "tp") if kind == "column" else P("tp")
    found: list[ops.BasicOperation] = [linear]
    specs: list[dict] = [{key: kernel for key in linear.specs()}]
    if bias:
        found.append(ops.Bias(n, tensor_parallel=kind == "column"))
        specs.append({"bias": P() if kind == "row" else P("tp")})
    if kind == "scattered":
        found.append(ops.ReduceScatter())
        specs.append({})
    x, y = (ROWS, FEATURES) if kind == "column" else (FEATURES, ROWS)
    return Model(kind, num_ranks, ops.Sequential(*found), tuple(specs), x, y)


def params_of(m: Model, a: Arrays, bias: jax.Array, dtype=None):
    """Returns global parameters; in "scattered", each rank has a separate bias."""
    found: list[dict] = []
    for op in m.seq.basic_ops:
        own: dict = {}
        if isinstance(op, ops.BasicLinear):
            own = {"kernel": a.w if dtype is None else a.w.astype(dtype)}
            if op.accumulate_into_main_grad:
                own["main_grad"] = a.main_grad
        if isinstance(op, ops.Bias):
            own = {"bias": bias}
        found.append(own)
    return tuple(found)


def bias_of(kind: str, num_ranks: int, a: Arrays, make) -> jax.Array:
    """Returns one bias for all ranks, or the concatenated biases of all ranks."""
    n = a.w.shape[1]
    return make(5, (n * num_ranks if kind == "scattered" else n,), "float32")


def expected_result(kind: str, num_ranks: int, a: Arrays, bias) -> np.ndarray:
    """Computes the layer in plain f32 arithmetic."""
    added = wide(bias).reshape(-1, a.w.shape[1]).sum(0)
    return wide(a.x) @ wide(a.w) + added


def expected_gradients(kind: str, num_ranks: int, a: Arrays):
    """Computes the gradients of x, kernel and bias in f32."""
    db = bias_grad(a)
    return dgrad(a), wgrad(a), np.tile(db, num_ranks) if kind == "scattered" else db


def weighted(layer, dy):
    """Returns a loss whose gradient by the layer's result is `dy`, and the result."""

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    return loss
