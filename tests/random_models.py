"""Random models by seed: their layers, mesh and inputs."""

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
# Linear layers, pairs of them with or without a gate, and composed modules.
RETROFITTED = ("column", "row", "plain", "pair", "gated", "attention")
KINDS = (*RETROFITTED, "mlp", "layer")
SINGLE = {"column": "column", "row": "row", "plain": None}
# Transformations of every block. A condition is true on all ranks.
WRAPS = (None, None, None, "remat", "cond")
POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("jax_ub.y"),
    jax.checkpoint_policies.save_anything_except_these_names("jax_ub.x"),
)


@dataclasses.dataclass(frozen=True, eq=False)  # modules that contain it are hashed
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
    repeats: int  # length of the scan over each block; 0 for no scan
    wrap: str | None
    policy: Any  # residuals that rematerialized blocks save
    spreads: bool  # shards parameters over the data axes, too
    x_dtype: Any
    plain: dict[str, Any]  # options of Flax's layers
    overlap: dict[str, Any]  # further options of the layers of jax_ub

    @property
    def mesh(self) -> Mesh:
        """Returns a mesh of the first devices."""
        sizes = tuple(self.axes.values())
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        return Mesh(devices, tuple(self.axes), (TYPES[self.types],) * len(sizes))

    @property
    def is_linen(self) -> bool:
        """Whether the model is a linen model."""
        return self.api in ("linen", "dot_general")

    @property
    def dtypes(self) -> dict[str, Any]:
        """Returns the options of layers without bias."""
        return {name: self.plain[name] for name in ("dtype", "param_dtype")}

    @property
    def num_outs(self) -> int:
        """Returns the options of an untied head."""
        return self.axes["tp"] * 3

    def inputs(self, seed: int) -> jax.Array:
        """Returns token ids or activations."""
        noise, shape = np.random.default_rng(seed), (*self.lead, self.tokens)
        if self.begins == "embedding":
            return jnp.asarray(noise.integers(0, VOCABULARY, shape), jnp.int32)
        return jnp.asarray(noise.standard_normal((*shape, self.hidden)), self.x_dtype)

    @property
    def main_grad(self) -> bool:
        """Whether the kernels of jax_ub accumulate their gradients."""
        return self.overlap.get("main_grad", False)

    @property
    def keeps(self) -> bool:
        """Whether a block must preserve shape and dtype."""
        return self.repeats > 0 or self.wrap == "cond"

    def run(self, block, x: jax.Array) -> jax.Array:
        """Calls a block."""
        y = self.settled(block(x))
        return y.astype(x.dtype) if self.keeps else y

    def settled(self, x: jax.Array) -> jax.Array:
        """Replicates a result: explicit axes reject sums of different shardings."""
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
    # linen's attention has no groups, and JAX's has none on explicit axes of one rank.
    has_groups = api == "nnx" or (api == "overlap" and num_ranks > 1)
    if types == "explicit" and math.prod(lead) == 1 and made_of is RETROFITTED:
        # Without a leading axis, the tokens that Flax's attention contracts are sharded
        # over the data axes; JAX 0.12's attention rejects such a single sequence.
        made_of = RETROFITTED[:-1]
    kinds = tuple(drawn.choices(made_of, k=one_of((1, 2, 3))))
    # JAX's attention cannot multiply it on CPUs.
    has_half = not {"attention", "layer"} & set(kinds)
    half = jnp.float16 if has_half and drawn.random() < 0.3 else jnp.bfloat16
    overlap = {
        "sequence_parallel": one_of((True, True, False)),
        "method": one_of((None, None, "direct", "xla", "ring_exchange")),
    }
    if api in ("nnx", "linen"):
        overlap["main_grad"] = drawn.random() < 0.25
    return Drawn(
        api=api,
        kinds=kinds,
        begins="embedding" if ends == "tied" else one_of(("inputs", "embedding")),
        ends=ends,
        axes=axes,
        types=types,
        lead=lead,
        tokens=num_parts * one_of((1, 2, 3)),
        hidden=num_ranks * one_of((3, 4, 5, 6)),
        inner=num_ranks * one_of((1, 3, 8)),
        heads=heads,
        kv_heads=one_of((num_ranks, heads)) if has_groups else heads,
        repeats=one_of((0, 0, 0, 2, 3)),
        wrap=one_of(WRAPS),
        policy=one_of(POLICIES),
        spreads=one_of((True, False)),
        x_dtype=one_of((jnp.float32, jnp.float32, half)),
        plain={
            "use_bias": one_of((True, False)),
            "dtype": one_of((None, None, jnp.float32, half)),
            "param_dtype": one_of((jnp.float32, jnp.float32, half)),
        },
        overlap=overlap,
    )
