"""Drawn models of nnx, with Flax's layers or with the layers of jax_ub."""

import jax
import jax.numpy as jnp
from flax import nnx
from random_models import HEAD_DIM, SINGLE, VOCABULARY, Drawn

import jax_ub as ub
from jax_ub import flax as ours

# An additional axis of parameters, which no mesh axis shards.
STACKED = {"transform_metadata": {nnx.PARTITION_NAME: None}}


class Make:
    """Creates the layers of the Flax model."""

    def __init__(self, drawn: Drawn, rngs=None):
        self.drawn = drawn
        self.options = {"rngs": rngs or nnx.Rngs(0), **drawn.plain}

    def linear(self, ins, outs, parallel):
        return nnx.Linear(ins, outs, **self.options)

    def norm(self):
        rngs = self.options["rngs"]
        return nnx.LayerNorm(self.drawn.hidden, rngs=rngs, **self.drawn.dtypes)

    def attention(self):
        return nnx.MultiHeadAttention(*self._heads(), decode=False, **self.options)

    def _heads(self):
        d = self.drawn
        return d.heads, d.hidden, d.heads * HEAD_DIM, d.hidden, d.kv_heads

    def mlp(self):
        return MLP(self, norm=True)

    def layer(self):
        return Layer(self)

    def normed_head(self):
        return NormedLinear(self)


class MakeOurs(Make):
    """Creates the layers of the jax_ub model."""

    def __init__(self, drawn: Drawn, rngs=None):
        super().__init__(drawn, rngs)
        self.options |= drawn.overlap

    def linear(self, ins, outs, parallel):
        return ours.Linear(ins, outs, parallel=parallel, **self.options)

    def attention(self):
        return ours.MultiHeadAttention(*self._heads(), **self.options)

    def mlp(self):
        sizes = self.drawn.hidden, self.drawn.inner
        return ours.LayerNormMLP(*sizes, activation="swiglu", **self.options)

    def layer(self):
        d = self.drawn
        return ours.TransformerLayer(
            d.hidden,
            d.inner,
            d.heads,
            num_gqa_groups=d.kv_heads,
            kv_channels=HEAD_DIM,
            is_causal=False,
            activation="swiglu",
            **self.options,
        )

    def normed_head(self):
        sizes = self.drawn.hidden, self.drawn.num_outs
        return ours.LayerNormLinear(*sizes, parallel="column", **self.options)


class MLP(nnx.Module):
    """`LayerNormMLP`, or two layers with a residual connection."""

    def __init__(self, make, *, norm=False, gated=True):
        d = make.drawn
        self.drawn = d
        self.norm = make.norm() if norm else nnx.data(None)
        self.fc1 = make.linear(d.hidden, d.inner, "column")
        self.gate = nnx.data(None)
        if gated:
            self.gate = make.linear(d.hidden, d.inner, "column")
        self.fc2 = make.linear(d.inner, d.hidden, "row")

    def __call__(self, x):
        normed = x if self.norm is None else self.norm(x)
        h = self.fc1(normed)
        h = jnp.tanh(h) if self.gate is None else jax.nn.silu(self.gate(normed)) * h
        y = self.fc2(h)
        return x + self.drawn.settled(y) if self.norm is None else y


class Layer(nnx.Module):
    """`TransformerLayer`."""

    def __init__(self, make):
        self.attention_norm, self.attention = make.norm(), make.attention()
        self.mlp = make.mlp()

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class NormedLinear(nnx.Module):
    """`LayerNormLinear`."""

    def __init__(self, make):
        self.norm = make.norm()
        self.linear = make.linear(make.drawn.hidden, make.drawn.num_outs, "column")

    def __call__(self, x):
        return self.linear(self.norm(x))


class Stack(nnx.Module):
    """Blocks of one kind, which are called by a scan."""

    def __init__(self, make, kind):
        self.drawn = d = make.drawn

        def create(rngs):
            return _block(type(make)(d, rngs), kind)

        create = nnx.vmap(create, in_axes=0, out_axes=0, **STACKED)
        self.layers = nnx.split_rngs(splits=d.repeats)(create)(nnx.Rngs(0))

    def __call__(self, x):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **STACKED)
        return scan(lambda block, x: _run(self.drawn, block, x))(self.layers, x)


class Model(nnx.Module):
    """Blocks, optionally between an embedding and a head."""

    def __init__(self, make: Make):
        d = make.drawn
        self.drawn = d
        create = Stack if d.repeats else _block
        self.blocks = nnx.List([create(make, kind) for kind in d.kinds])
        self.embed = self.head = nnx.data(None)
        if d.begins == "embedding":
            rngs = make.options["rngs"]
            self.embed = nnx.Embed(VOCABULARY, d.hidden, rngs=rngs, **d.dtypes)
        if d.ends == "head":
            self.head = make.linear(d.hidden, d.num_outs, "column")
        if d.ends == "normed head":
            self.head = make.normed_head()

    def __call__(self, x):
        x = x if self.embed is None else self.embed(x)
        x = self.drawn.settled(x) if self.drawn.keeps else x
        for block in self.blocks:
            x = block(x) if self.drawn.repeats else _run(self.drawn, block, x)
        if self.drawn.ends == "tied":
            return self.embed.attend(x)
        return x if self.head is None else self.head(x)


def _block(make, kind):
    if kind in SINGLE:
        return make.linear(*(make.drawn.hidden,) * 2, SINGLE[kind])
    if kind in ("pair", "gated"):
        return MLP(make, gated=kind == "gated")
    return getattr(make, kind)()


def _run(drawn, block, x):
    """Calls a block under the transformations that were drawn for it."""
    if drawn.wrap == "remat":
        return nnx.remat(drawn.run, policy=drawn.policy)(block, x)
    if drawn.wrap == "cond":
        return nnx.cond(jnp.all(x == x), drawn.run, lambda _, x: x, block, x)
    return drawn.run(block, x)


with_main_grads = ours.with_main_grads

RULES = {
    r".*\.(fc1|gate|query|key|value)|head(\.linear)?": "column",
    r".*\.(fc2|out)": "row",
}


def models(drawn: Drawn):
    """Returns functions (state, x) -> y of the Flax and the jax_ub model, and states.

    The states are abstract and differ only in their shardings.
    """
    plain = nnx.eval_shape(lambda: Model(Make(drawn)))
    with jax.set_mesh(drawn.mesh):
        if drawn.api == "nnx":
            model = nnx.eval_shape(lambda: Model(MakeOurs(drawn)))
        else:
            model = _overlapped(nnx.eval_shape(lambda: Model(Make(drawn))), drawn)
    (graph, state), (own_graph, own_state) = map(nnx.split, (plain, model))
    return (
        lambda state, x: nnx.merge(graph, state)(x),
        lambda state, x: nnx.merge(own_graph, state)(x),
        state,
        own_state,
    )


def _overlapped(model, drawn):
    inside = ".layers" if drawn.repeats else ""
    single = {
        f"blocks.{i}{inside}": SINGLE.get(kind) for i, kind in enumerate(drawn.kinds)
    }
    rules = {path: kind for path, kind in single.items() if kind is not None}
    has = {"column": drawn.ends in ("head", "normed head"), "row": False}
    if set(drawn.kinds) - set(SINGLE):
        has = {"column": True, "row": True}
    rules |= {pattern: kind for pattern, kind in RULES.items() if has[kind]}
    return ub.overlap(model, rules, **drawn.overlap) if rules else model


def split(state):
    """Returns the parameters and the accumulators of a state."""
    return nnx.split_state(state, nnx.Param, ours.MainGrad)


def join(params, main_grads):
    """Returns the states of both models."""
    return nnx.merge_state(params, main_grads)
