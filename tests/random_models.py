"""Models drawn by a seed: what they are made of, their mesh and their inputs."""

import dataclasses
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax_models import TYPES
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

VOCABULARY, HEAD_DIM = 24, 4
# Linear layers, pairs of them with or without a gate, and what is made of these.
RETROFITTED = ("column", "row", "plain", "pair", "gated", "attention")
KINDS = (*RETROFITTED, "mlp", "layer")
SINGLE = {"column": "column", "row": "row", "plain": None}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model, a mesh and inputs."""

    api: str  # "nnx", "linen", "overlap" or "dot_general"
    kinds: tuple[str, ...]
    begins: str
    ends: str
    axes: dict[str, int]
    types: str
    lead: tuple[int, ...]
    tokens: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    x_dtype: Any
    plain: dict[str, Any]  # the options of Flax's own layers
    overlap: dict[str, Any]  # and those of ours besides

    @property
    def mesh(self) -> Mesh:
        """The mesh, of the first devices."""
        sizes = tuple(self.axes.values())
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        return Mesh(devices, tuple(self.axes), (TYPES[self.types],) * len(sizes))

    @property
    def is_linen(self) -> bool:
        """Whether the model is one of linen."""
        return self.api in ("linen", "dot_general")

    @property
    def dtypes(self) -> dict[str, Any]:
        """The options of what has no bias."""
        return {name: self.plain[name] for name in ("dtype", "param_dtype")}

    @property
    def num_outs(self) -> int:
        """Of a head of its own."""
        return self.axes["tp"] * 3

    def inputs(self, seed: int) -> jax.Array:
        """Token numbers, or activations."""
        noise, shape = np.random.default_rng(seed), (*self.lead, self.tokens)
        if self.begins == "embedding":
            return jnp.asarray(noise.integers(0, VOCABULARY, shape), jnp.int32)
        return jnp.asarray(noise.standard_normal((*shape, self.hidden)), self.x_dtype)

    def settled(self, x: jax.Array) -> jax.Array:
        """Gathers what a block made: an explicit mesh adds nothing that lies apart."""
        spec = jax.typeof(x).sharding.spec
        return jax.sharding.reshard(x, P()) if any(spec) else x


def draw(seed: int) -> Drawn:
    """Draws a model that can run: sizes divide into the ranks."""
    drawn = random.Random(seed)
    one_of = drawn.choice
    api = one_of(("nnx", "linen", "overlap", "dot_general"))
    num_ranks = one_of((1, 2, 2, 3, 4, 5, 8))
    axes = {"tp": num_ranks}
    for name in ("dp", "pp"):
        size = one_of((0, 1, 2, 3))
        if 0 < size <= 16 // math.prod(axes.values()):
            axes[name] = size
    axes = {name: axes[name] for name in drawn.sample(list(axes), len(axes))}
    # Some leading axes divide into the data axes, and some do not.
    lead = one_of(((), (1,), (4,), (2, 3), (6, 1, 2), (3,)))
    num_parts = num_ranks if lead else math.prod(axes.values())
    ends = one_of(("nothing", "head", "normed head", "tied"))
    heads = num_ranks * one_of((1, 2))
    made_of = KINDS if api in ("nnx", "linen") else RETROFITTED
    types = one_of(tuple(TYPES))
    # linen's attention has none, and JAX's not on explicit axes of one rank.
    has_groups = api == "nnx" or (api == "overlap" and num_ranks > 1)
    if types == "explicit" and math.prod(lead) == 1 and made_of is RETROFITTED:
        # Flax's attention contracts tokens, which lie over the data axes without a
        # leading axis; and JAX 0.12's takes no single sequence that lies on one.
        made_of = RETROFITTED[:-1]
    return Drawn(
        api=api,
        kinds=tuple(drawn.choices(made_of, k=one_of((1, 2, 3)))),
        begins="embedding" if ends == "tied" else one_of(("inputs", "embedding")),
        ends=ends,
        axes=axes,
        types=types,
        lead=lead,
        tokens=num_parts * one_of((1, 2)),
        hidden=num_ranks * one_of((4, 6)),
        inner=num_ranks * one_of((1, 3, 8)),
        heads=heads,
        kv_heads=one_of((num_ranks, heads)) if has_groups else heads,
        x_dtype=one_of((jnp.float32, jnp.float32, jnp.bfloat16)),
        plain={
            "use_bias": one_of((True, False)),
            "dtype": one_of((None, None, jnp.float32, jnp.bfloat16)),
            "param_dtype": one_of((jnp.float32, jnp.float32, jnp.bfloat16)),
        },
        overlap={
            "sequence_parallel": one_of((True, True, False)),
            "method": one_of((None, None, "direct", "xla", "ring_exchange")),
        },
    )
