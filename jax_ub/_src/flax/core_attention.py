"""Dot-product attention without projections, on each rank's own heads."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, UnknownNameError, shown
from jax_ub._src.flax.dropout import per_device_key, varying_axes
from jax_ub._src.flax.rotary import rotate
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.sharded_linear import (
    batch_axes,
    nontrivial_axes,
    shard_map_operands,
)


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """Attention of queries, keys and values, on each rank's own heads.

    It does not communicate.

    With global arrays it runs in its own `jax.shard_map`, on each rank's heads and
    sequences. Inside the caller's `jax.shard_map` its arguments are this rank's shards.

    Attributes:
        sharding_layout: the sharding layout of the projections. If its `parallel` is
            None, all heads are on every rank.
        attention_fn: called as `attention_fn(q, k, v, mask=, is_causal=)` with arrays
            `[batch, tokens, heads, head_dim]`. With dropout it is also passed
            `dropout_rng=`, `dropout_rate=` and `broadcast_dropout=`. None uses
            `jax.nn.dot_product_attention`, or `nnx.dot_product_attention` with
            dropout.
        is_causal: whether a token attends only to itself and earlier tokens.
        rotary_base: base of the rotary embeddings of queries and keys; None disables
            them.
        dropout_rate: the probability of dropping an attention weight.
        broadcast_dropout: whether all sequences and heads drop the same weights.

    Raises:
        UnknownNameError: if `attention_fn` is not callable.
    """

    sharding_layout: ShardingLayout
    attention_fn: Callable[..., jax.Array] | None = None
    is_causal: bool = False
    rotary_base: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True

    def __post_init__(self):
        """Checks that `attention_fn` is None or a callable."""
        if self.attention_fn is not None and not callable(self.attention_fn):
            raise UnknownNameError(
                f"attention: attention_fn = {shown(self.attention_fn)} is no function. "
                "Pass one, for example functools.partial(jax.nn.dot_product_attention, "
                'implementation="cudnn").'
            )

    def check_heads(self, num_heads: int, num_kv_heads: int, *arrays) -> None:
        """Checks that the number of ranks divides the numbers of heads.

        Does nothing if the mesh is unknown.

        Args:
            num_heads: the global number of query heads.
            num_kv_heads: the global number of key and value heads.
            *arrays: arrays whose sharding may contain the mesh.

        Raises:
            ShapeContractError: if the number of ranks does not divide a number of
                heads.
        """
        mesh = (
            None
            if self.sharding_layout.is_local()
            else self.sharding_layout.find_mesh(*arrays)
        )
        if mesh is None:
            return
        axis_name, num_ranks = (
            self.sharding_layout.axis_name,
            self.sharding_layout.axis_size(mesh),
        )
        for name, num in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if num % num_ranks:
                raise ShapeContractError(
                    f"attention: {name} = {num} does not divide into the {num_ranks} "
                    f"ranks of mesh axis {shown(axis_name)}, which have whole heads. "
                    f"Use {-(-num // num_ranks) * num_ranks}, or fewer ranks."
                )

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the attention output, `[..., tokens, heads, head_dim]`.

        Args:
            q: queries, `[..., tokens, heads, head_dim]`.
            k: keys. Their number of heads divides the number of query heads.
            v: values, with the shape of the keys.
            mask: `[..., heads, tokens, tokens of k]`, or broadcastable to it; true
                where a query attends to a key.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            dropout_key: PRNG key, the same on every rank; None disables dropout.

        Raises:
            ShapeContractError: if the mask or the positions cannot be broadcast.
        """
        *lead, num_tokens, num_heads, _ = q.shape
        if mask is not None:
            whole = (*lead, num_heads, num_tokens, k.shape[-3])
            mask = _fitted("mask", mask, whole).astype(bool)
        if positions is not None:
            positions = _fitted("positions", positions, (*lead, num_tokens))
        operands = (q, k, v, mask, positions, dropout_key)
        mesh = (
            None
            if self.sharding_layout.is_local()
            else self.sharding_layout.find_mesh(q)
        )
        if mesh is None or shapes.has_symbolic_sizes(q):
            return self.attend(varying_axes(q), *operands)
        return _on_mesh(self, mesh, *operands)

    def attend(self, axes, q, k, v, mask, positions, dropout_key) -> jax.Array:
        """Computes attention of one rank's shards of queries, keys and values.

        `axes` are the mesh axes whose ranks have different heads or sequences. Each
        rank along them draws its own dropout mask. `__call__` documents the other
        arguments.
        """
        if self.rotary_base is not None:
            if positions is None:
                positions = jnp.arange(q.shape[-3])
            q, k = (rotate(x, positions, self.rotary_base) for x in (q, k))
        lead = q.shape[:-3]
        batch = math.prod(lead)  # not -1: reshape cannot infer it if an array is empty
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:]))
            mask = mask.reshape(batch, *mask.shape[-3:])
        q, k, v = (x.reshape(batch, *x.shape[-3:]) for x in (q, k, v))
        if dropout_key is None:
            attention_fn = self.attention_fn or jax.nn.dot_product_attention
            y = attention_fn(q, k, v, mask=mask, is_causal=self.is_causal)
        else:
            y = self._attend_and_drop(axes, q, k, v, mask, dropout_key)
        if not shapes.is_array(y) or y.shape[:-1] != q.shape[:-1]:
            raise ShapeContractError(
                f"attention: attention_fn returned {shown(y)} for queries of shape "
                f"{q.shape}. Return [batch, tokens, heads, head_dim]."
            )
        return y.reshape(*lead, *y.shape[1:])

    def _attend_and_drop(self, axes, q, k, v, mask, dropout_key):
        options: dict[str, Any] = {
            "dropout_rng": per_device_key(dropout_key, axes),
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
        }
        if self.attention_fn is not None:
            is_causal = self.is_causal
            return self.attention_fn(q, k, v, mask=mask, is_causal=is_causal, **options)
        if self.is_causal:
            behind = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
            mask = behind if mask is None else mask & behind
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return nnx.dot_product_attention(q, k, v, mask=mask, **options)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _on_mesh(core, mesh, *operands):
    """Computes attention of global arrays in a `shard_map` over the mesh.

    The `shard_map` covers all mesh axes that are not manual yet. It shards heads over
    the tensor-parallel axes and the leading batch axis over the data axes.
    """
    q, _, _, mask, positions, _ = operands
    sharding_layout = core.sharding_layout
    data_axes = batch_axes(sharding_layout, mesh, q) if q.ndim > 3 else ()
    lead = [data_axes or None, *[None] * (q.ndim - 4)] if q.ndim > 3 else []
    axis_name = None if sharding_layout.parallel is None else sharding_layout.axis_name
    heads = P(*lead, None, axis_name, None)
    specs = (
        *(heads,) * 3,
        _split(mask, (*lead, axis_name, None, None)),
        _split(positions, (*lead, None)),
        P(),
    )

    # All axes whose ranks have different sequences or heads. `varying_axes(q)` returns
    # the axes of the caller's shard_map, if there is one.
    several = nontrivial_axes(mesh, data_axes)
    own = () if sharding_layout.parallel is None else sharding_layout.axes
    axes = {*varying_axes(q), *several, *own}

    def local(*operands):
        return core.attend(axes, *operands)

    return shard_map_operands(local, mesh, specs, heads, *operands)


def _split(array, entries):
    """Returns an array's `PartitionSpec`; leaves dimensions of size 1 unsharded.

    `entries` has the mesh axis of each dimension.
    """
    if array is None:
        return P()
    shapes = zip(array.shape, entries, strict=True)
    return P(*(entry if size > 1 else None for size, entry in shapes))


def _fitted(name, array, whole):
    """Reshapes an array to the rank of `whole` by prepending dimensions of size 1.

    Raises:
        ShapeContractError: if the array cannot be broadcast to the shape `whole`.
    """
    shapes.check_array("attention", name, array)
    padded = (1,) * (len(whole) - array.ndim) + array.shape
    sizes = itertools.zip_longest(padded, whole)
    if any(size not in (1, full) for size, full in sizes):
        raise ShapeContractError(
            f"attention: {name} has shape {array.shape}, which does not broadcast to "
            f"{whole}. Pass an array of that shape, with 1 where it is the same."
        )
    return array.reshape(padded)
