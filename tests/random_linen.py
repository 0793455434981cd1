"""Random linen models, with Flax's layers or with the layers of jax_ub."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict, unflatten_dict
from random_models import HEAD_DIM, SINGLE, VOCABULARY, Drawn

import jax_ub as ub
from jax_ub.flax import linen as ours


class Make:
    """Creates the layers of the Flax model."""

    def __init__(self, drawn: Drawn):
        self.drawn, self.options = drawn, drawn.plain

    def linear(self, outs, parallel, name):
        return nn.Dense(outs, name=name, **self.options)

    def norm(self, name):
        return nn.LayerNorm(name=name, **self.drawn.dtypes)

    def attention(self, name, **options):
        d = self.drawn
        sizes = {"qkv_features": d.heads * HEAD_DIM, "out_features": d.hidden}
        return nn.MultiHeadDotProductAttention(
            d.heads, name=name, **sizes, **self.options, **options
        )

    def mlp(self, name):
        return MLP(self, norm=True, name=name)

    def layer(self, name):
        return Layer(self, name=name)

    def normed_head(self, name):
        return NormedLinear(self, name=name)


class MakeRetrofitted(Make):
    """Creates Flax layers with the `dot_general` of jax_ub."""

    def dot_general(self, kind):
        return ub.dot_general(kind, **self.drawn.overlap)

    def linear(self, outs, parallel, name):
        if parallel is None:
            return super().linear(outs, parallel, name)
        dot_general = self.dot_general(parallel)
        return nn.Dense(outs, name=name, dot_general=dot_general, **self.options)

    def attention(self, name):
        column, row = map(self.dot_general, ("column", "row"))
        return super().attention(name, qkv_dot_general=column, out_dot_general=row)


class MakeOurs(Make):
    """Creates the layers of the jax_ub model."""

    def __init__(self, drawn: Drawn):
        super().__init__(drawn)
        self.options = {**drawn.plain, **drawn.overlap}

    def linear(self, outs, parallel, name):
        return ours.Linear(outs, parallel=parallel, name=name, **self.options)

    def attention(self, name):
        d = self.drawn
        sizes = d.heads, d.heads * HEAD_DIM, d.hidden
        return ours.MultiHeadAttention(*sizes, name=name, **self.options)

    def mlp(self, name):
        options = {"activation": "swiglu", "name": name, **self.options}
        return ours.LayerNormMLP(self.drawn.hidden, self.drawn.inner, **options)

    def layer(self, name):
        return ours.TransformerLayer(
            self.drawn.hidden,
            self.drawn.inner,
            self.drawn.heads,
            kv_channels=HEAD_DIM,
            is_causal=False,
            activation="swiglu",
            name=name,
            **self.options,
        )

    def normed_head(self, name):
        outs = self.drawn.num_outs
        return ours.LayerNormLinear(outs, parallel="column", name=name, **self.options)


class MLP(nn.Module):
    """`LayerNormMLP`, or two layers with a residual connection."""

    make: Any
    norm: bool = False
    gated: bool = True

    @nn.compact
    def __call__(self, x):
        make, d = self.make, self.make.drawn
        normed = make.norm("norm")(x) if self.norm else x
        h = make.linear(d.inner, "column", "fc1")(normed)
        if self.gated:
            h = jax.nn.silu(make.linear(d.inner, "column", "gate")(normed)) * h
        else:
            h = jnp.tanh(h)
        y = make.linear(d.hidden, "row", "fc2")(h)
        return y if self.norm else x + d.settled(y)


class Layer(nn.Module):
    """`TransformerLayer`."""

    make: Any

    @nn.compact
    def __call__(self, x):
        normed = self.make.norm("attention_norm")(x)
        x = x + self.make.attention("attention")(normed)
        return x + self.make.mlp("mlp")(x)


class NormedLinear(nn.Module):
    """`LayerNormLinear`."""

    make: Any

    @nn.compact
    def __call__(self, x):
        outs = self.make.drawn.num_outs
        return self.make.linear(outs, "column", "linear")(self.make.norm("norm")(x))


class Model(nn.Module):
    """Blocks, optionally between an embedding and a head."""

    make: Any

    @nn.compact
    def __call__(self, x):
        make, d = self.make, self.make.drawn
        embed = nn.Embed(VOCABULARY, d.hidden, name="embed", **d.dtypes)
        x = embed(x) if d.begins == "embedding" else x
        x = d.settled(x) if d.keeps else x
        for i, kind in enumerate(d.kinds):
            run = _scanned if d.repeats else _run
            x = run(d, _block(make, kind, f"block{i}"), x)
        if d.ends == "head":
            return make.linear(d.num_outs, "column", "head")(x)
        if d.ends == "normed head":
            return make.normed_head("head")(x)
        return embed.attend(x) if d.ends == "tied" else x


def _block(make, kind, name):
    if kind in SINGLE:
        return make.linear(make.drawn.hidden, SINGLE[kind], name)
    if kind in ("pair", "gated"):
        return MLP(make, gated=kind == "gated", name=name)
    return getattr(make, kind)(name)


def _run(drawn, block, x):
    """Calls a block under the transformations that were drawn for it."""
    if drawn.wrap == "remat":
        return nn.remat(drawn.run, policy=drawn.policy)(block, x)
    if drawn.wrap == "cond" and not block.is_initializing():
        return nn.cond(jnp.all(x == x), drawn.run, lambda _, x: x, block, x)
    return drawn.run(block, x)


def _scanned(drawn, block, x):
    """Calls a block several times, each time with separate parameters."""
    if drawn.wrap == "remat":
        scan = nn.remat_scan(drawn.run, (drawn.repeats,), drawn.policy)
        return scan(block, x)
    scan = nn.scan(
        lambda block, x, _: (_run(drawn, block, x), None),
        variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
        length=drawn.repeats,
    )
    return scan(block, x, None)[0]


def models(drawn: Drawn):
    """Returns functions (variables, x) -> y of both models, and abstract variables.

    The variables of both models have the same number, shapes and dtypes.
    """
    own = MakeOurs if drawn.api == "linen" else MakeRetrofitted
    plain, model = Model(Make(drawn)), Model(own(drawn))
    given = jax.random.key(0), drawn.inputs(0)
    variables = jax.eval_shape(plain.init, *given)
    with jax.set_mesh(drawn.mesh):
        own_variables = jax.eval_shape(model.init, *given)
    return plain.apply, model.apply, variables, own_variables


def split(variables):
    """Returns the parameters and the accumulators of all variables."""
    others = dict(variables)
    main_grads = {OVERWRITE_WITH_GRADIENT: others.pop(OVERWRITE_WITH_GRADIENT, {})}
    return others, main_grads


def join(params, main_grads):
    """Returns the variables of both models."""
    return {**params, **main_grads}


def with_main_grads(gradients, main_grads):
    """Returns gradients, with kernel gradients replaced by accumulated ones."""
    flat = flatten_dict(gradients)
    for (_, *path, _), main_grad in flatten_dict(main_grads).items():
        flat["params", *path, "kernel"] = main_grad
    return unflatten_dict(flat)
