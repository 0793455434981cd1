"""Attention of each rank's heads, rotary embeddings, and dropout of sharded arrays."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ub._src import arguments, checks
from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import ShapeContractError, UnknownNameError, shown
from jax_ub._src.flax.options import check_rotary_base
from jax_ub._src.primitives import vma
from jax_ub._src.reference import with_rank
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.specs import batch_axes, free_axes, nontrivial_axes, reshard


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """Computes multi-head attention, with the heads sharded over the ranks.

    Each rank computes its heads and sequences, without communication. Global arrays are
    sharded by a `jax.shard_map`; inside the caller's, the arguments are shards.

    `sharding_layout` belongs to the projections. If its `parallel` is None, all heads
    are on every rank. `MultiHeadAttention` documents the other options.
    """

    sharding_layout: ShardingLayout
    attention_fn: Callable[..., jax.Array] | None = None
    is_causal: bool = False
    rotary_base: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True

    def __post_init__(self):
        arguments.check("attention", **vars(self))
        check_rotary_base("attention", self.rotary_base)
        checks.check_rate("attention", "dropout_rate", self.dropout_rate)
        given = self.attention_fn
        if given is not None and not (callable(given) and checks.is_hashable(given)):
            raise UnknownNameError(
                f"attention: attention_fn = {shown(given)} is not a hashable "
                "function. Pass a function, for example functools.partial("
                'jax.nn.dot_product_attention, implementation="cudnn").'
            )

    def check_heads(self, num_heads: int, num_kv_heads: int, *arrays) -> None:
        """Raises an error unless query and key heads divide evenly among the ranks.

        Does nothing if the mesh is unknown.
        """
        mesh = self.sharding_layout.global_mesh(*arrays)
        if mesh is None:
            return
        num_ranks = self.sharding_layout.axis_size(mesh)
        for name, num in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if num % num_ranks:
                raise ShapeContractError(
                    f"attention: {name} = {num} does not divide into the {num_ranks} "
                    f"ranks of mesh axis {shown(self.sharding_layout.axis_name)}, "
                    "which have whole heads. Use "
                    f"{checks.round_up(num, num_ranks)}, or fewer ranks."
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
        """Computes attention of q, k, v, each `[..., tokens, heads, head_dim]`.

        The number of heads of k and v divides the number of query heads. `dropout_key`
        is the same on every rank; None disables dropout. `MultiHeadAttention` documents
        the other arguments.
        """
        *lead, num_tokens, num_heads, _ = q.shape
        if k.shape[:-3] != tuple(lead) or v.shape[:-1] != k.shape[:-1]:
            raise ShapeContractError(
                f"attention: queries have shape {q.shape}, keys {k.shape} and values "
                f"{v.shape}. Pass inputs of the same sequences, and inputs_v with as "
                "many tokens as inputs_k."
            )
        if self.rotary_base is not None and q.shape[-1] % 2:
            raise ShapeContractError(
                f"attention: rotary_base = {self.rotary_base}, but queries {q.shape} "
                f"have heads of {q.shape[-1]} features, and rotary embeddings rotate "
                "pairs of features. Use an even number, or rotary_base=None."
            )
        if mask is not None:
            whole = (*lead, num_heads, num_tokens, k.shape[-3])
            mask = _broadcastable("mask", mask, whole).astype(bool)
        if positions is not None:
            positions = _broadcastable("positions", positions, (*lead, num_tokens))
        operands = (q, k, v, mask, positions, dropout_key)
        mesh = self.sharding_layout.global_mesh(q)
        if mesh is None or checks.has_symbolic_sizes(q):
            return self.attend(varying_axes(q), *operands)
        return _on_mesh(self, mesh, *operands)

    def attend(self, axes, q, k, v, mask, positions, dropout_key) -> jax.Array:
        """Computes attention of one rank's heads, without communication.

        `axes` are the mesh axes whose ranks have different heads or sequences, and so
        draw different dropout masks.
        """
        if self.rotary_base is not None:
            if positions is None:
                positions = jnp.arange(q.shape[-3])
            q, k = (rotate(x, positions, self.rotary_base) for x in (q, k))
        lead = q.shape[:-3]
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:]))
            mask = lax.collapse(mask, 0, len(lead))
        q, k, v = (lax.collapse(x, 0, len(lead)) for x in (q, k, v))
        if dropout_key is None:
            attention_fn = self.attention_fn or jax.nn.dot_product_attention
            y = attention_fn(q, k, v, mask=mask, is_causal=self.is_causal)
        else:
            y = self._attend_and_drop(axes, q, k, v, mask, dropout_key)
        if not checks.is_array(y) or y.shape[:-1] != q.shape[:-1]:
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
    """Computes attention of global arrays, with heads sharded by a `shard_map`.

    Heads are sharded over the tensor-parallel axes, the leading axis over data axes.
    """
    q, _, _, mask, positions, _ = operands
    layout = core.sharding_layout
    data_axes = batch_axes(layout, mesh, q) if q.ndim > 3 else ()
    lead = [data_axes, *[None] * (q.ndim - 4)] if q.ndim > 3 else []
    axis_name = None if layout.parallel is None else layout.axis_name
    heads = P(*lead, None, axis_name, None)
    specs = (
        *(heads,) * 3,
        _broadcast_spec(mask, (*lead, axis_name, None, None)),
        _broadcast_spec(positions, (*lead, None)),
        P(),
    )
    # The mesh axes along which the ranks have different sequences or heads, and
    # therefore draw different dropout masks. `varying_axes(q)` has the manual axes of
    # the caller's shard_map over which q varies.
    head_axes = () if layout.parallel is None else layout.axes
    axes = {*varying_axes(q), *nontrivial_axes(mesh, data_axes), *head_axes}
    attend = functools.partial(core.attend, axes)
    manual = free_axes("attention", mesh)
    return jax.shard_map(attend, in_specs=specs, out_specs=heads, **manual)(
        *reshard(mesh, specs, operands)
    )


def _broadcast_spec(array, entries):
    """Makes a `PartitionSpec` of `entries`, but does not shard dimensions of size 1."""
    if array is None:
        return P()
    sizes = zip(array.shape, entries, strict=True)
    return P(*(entry if size > 1 else None for size, entry in sizes))


def _broadcastable(name, array, whole):
    """Checks that an array broadcasts to the shape `whole`; adds missing dimensions."""
    checks.check_array("attention", name, array)
    padded = (1,) * (len(whole) - array.ndim) + array.shape
    sizes = itertools.zip_longest(padded, whole)
    if any(size not in (1, full) for size, full in sizes):
        raise ShapeContractError(
            f"attention: {name} has shape {array.shape}, which does not broadcast to "
            f"{whole}. Pass an array of that shape, with size 1 for equal entries."
        )
    return array.reshape(padded)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Applies rotary position embeddings to queries or keys `[..., tokens, heads, D]`.

    Rotates each pair of features i and i + D/2 by the angle `position * base**(-2i/D)`
    in f32, as in GPT-NeoX and Llama. `positions` has shape `[..., tokens]`, or
    `[tokens]` for all sequences.

    Source: RoFormer, https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    frequencies = float(base) ** -(jnp.arange(half, dtype=jnp.float32) / half)
    positions = positions.astype(jnp.float32)[..., None, None]
    angles = positions * with_rank(frequencies, positions.ndim)
    cos, sin = (with_rank(f(angles), x.ndim) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the manual mesh axes over which an array may differ between ranks.

    They are in the array's type, except under `check_vma=False`: then all manual axes
    are returned.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return vma.axes_of(array) if vma.is_vma_checked(manual) else frozenset(manual)


def per_device_key(key: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Derives a different PRNG key for each rank along `axes` from one shared key."""
    for axis_name in sorted(axes):
        key = jax.random.fold_in(key, lax.axis_index(axis_name))
    return key


def dropout(y: jax.Array, rate: float, key: jax.Array, layout: Any) -> jax.Array:
    """Applies dropout to `[..., tokens, features]`, with a different mask per shard.

    `key` is the same on every rank. `layout.axis_name` shards tokens if
    `layout.sequence_parallel`; it is a `ShardingLayout` or a linen module.
    """
    # Without sequence parallelism, all tensor-parallel ranks have the same tokens. They
    # must draw the same mask, even if the type of y varies over their axis.
    replicated_axes = () if layout.sequence_parallel else axis_tuple(layout.axis_name)
    key = per_device_key(key, varying_axes(y).difference(replicated_axes))
    # Flax's dropout layers cannot be used here. An nnx.Dropout would be created during
    # a call, and nnx.tabulate cannot run modules that are created during a call.
    # nn.Dropout does not support arrays on a mesh with explicit axes.
    keep_rate = 1.0 - rate
    sharding = jax.typeof(y).sharding
    mask = jax.random.bernoulli(key, keep_rate, y.shape, out_sharding=sharding)
    return jnp.where(mask, y / keep_rate, jnp.zeros_like(y))
