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
# What is around every block. A condition has one value everywhere, and is true.
WRAPS = (None, None, None, "remat", "cond")
POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("jax_ub.y"),
    jax.checkpoint_policies.save_anything_except_these_names("jax_ub.x"),
)


@dataclasses.dataclass(frozen=True, eq=False)  # modules that hold it are hashed
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
    repeats: int  # of every block, in a scan; 0 for a block alone
    wrap: str | None
    policy: Any  # what is saved where blocks are rematerialized
    spreads: bool  # parameters over the data axes, too
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

    @property
    def main_grad(self) -> bool:
        """Whether our kernels have accumulators of their gradients."""
        return self.overlap.get("main_grad", False)

    @property
    def keeps(self) -> bool:
        """Whether what comes out of a block has to be like what went in."""
        return self.repeats > 0 or self.wrap == "cond"

    def run(self, block, x: jax.Array) -> jax.Array:
        """Calls a block."""
        y = self.settled(block(x))
        return y.astype(x.dtype) if self.keeps else y

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
