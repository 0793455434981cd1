"""The trainer: model, optimizer, and a jitted training step in `jax.shard_map`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub.flax import OverwriteWithGradient
from lm.gradients import AXES, accumulate, assemble, mean
from lm.losses import language_loss, linear_layers_loss
from lm.model import LanguageModel, Recipe, Sizes

# Inputs and targets, [microbatches, B, S]. A device embeds its own tokens, but computes
# logits of all tokens for its part of the vocabulary.
BATCH_SPECS = (PartitionSpec(None, "dp", "tp"), PartitionSpec(None, "dp", None))

WARM_UP_STEPS = 10  # number of steps until the learning rate has its maximum


class State(NamedTuple):
    """Training state with global arrays, as a checkpoint stores it.

    `fp8` is the state of delayed scaling; other recipes leave it empty.
    """

    params: nnx.State
    optimizer: optax.OptState
    fp8: nnx.State


def make_mesh(dp: int, tp: int) -> Mesh:
    """Arranges the first dp * tp devices as a mesh.

    Raises:
        SystemExit: if JAX has fewer devices.
    """
    devices = jax.devices()[: dp * tp]
    if len(devices) < dp * tp:
        raise SystemExit(
            f"--dp {dp} times --tp {tp} needs {dp * tp} devices, but jax has "
            f"{len(devices)}: {devices}. On CPU, unset JAX_NUM_CPU_DEVICES, or with "
            "--distributed, start more processes."
        )
    return Mesh(np.array(devices).reshape(dp, tp), AXES)


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam with a learning rate that warms up, then decays as 1/sqrt(step).

    The rate does not depend on the total number of steps, so a run can be resumed with
    more steps.
    """

    def rate(step: jax.Array) -> jax.Array:
        warmth = (step + 1) / WARM_UP_STEPS
        return learning_rate * jnp.minimum(warmth, warmth**-0.5)

    return optax.adam(rate, b2=0.95)


class Trainer:
    """Trains a model on a mesh with the axes dp and tp.

    Attributes:
        init: key -> the initial `State`, equal on every mesh.
        step: (state, inputs, targets) -> (new state, loss); donates the state.
        evaluate: (state, inputs, targets) -> loss.
        linear_layers: (state, inputs, targets) -> gradients of
            `linear_layers_loss`, which makes the linear layers' calls of one step.
        shapes: shapes, dtypes and shardings of the `State`.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        mesh: Mesh,
        method: str,
        dtype: jnp.dtype,
        optimizer: optax.GradientTransformation,
        fp8: Recipe | None = None,
    ):
        """Traces the model. Its programs are compiled on their first call.

        Args:
            sizes: sizes of the model.
            mesh: the mesh; dp shards the batch, tp shards tokens and kernels.
            method: method of the linear layers; "xla" is plain `jax.lax`.
            dtype: dtype of the computation; parameters and gradients are f32.
            optimizer: an elementwise optimizer, because devices update their shards.
            fp8: FP8 recipe of the blocks' linear layers, or None.
        """
        self._mesh, self._optimizer, self._dtype = mesh, optimizer, dtype

        def build(key: jax.Array) -> tuple[nnx.GraphDef, State]:
            rngs = nnx.Rngs(key)
            model = LanguageModel(sizes, dtype=dtype, method=method, rngs=rngs, fp8=fp8)
            graph, states, params = nnx.split(model, OverwriteWithGradient, ...)
            return graph, State(params, optimizer.init(params), states)

        self._graph, shapes = jax.eval_shape(build, jax.random.key(0))
        self._specs = specs = _specs(shapes, optimizer)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        self.shapes = jax.tree.map(
            lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings
        )
        self.init = lambda key: jax.device_put(build(key)[1], shardings)
        self.step = self._on_mesh(
            self._step, specs, (specs, PartitionSpec()), donate_argnums=0
        )
        self.evaluate = self._on_mesh(self._evaluate, specs, PartitionSpec())
        self.linear_layers = self._on_mesh(self._linear_layers, specs, specs.params)

    def _on_mesh(self, function, in_spec, out_specs, **options):
        sharded = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(in_spec, *BATCH_SPECS),
            out_specs=out_specs,
        )
        return jax.jit(sharded, **options)

    def _step(self, state, inputs, targets):
        gradients, fp8, loss = self._gradients(language_loss, state, inputs, targets)
        params, optimizer, _ = state
        updates, optimizer = self._optimizer.update(gradients, optimizer, params)
        params = optax.apply_updates(params, updates)
        return State(params, optimizer, fp8), lax.psum(loss, "dp")

    def _linear_layers(self, state, inputs, targets):
        return self._gradients(linear_layers_loss, state, inputs, targets)[0]

    def _gradients(self, loss_fn, state, *batch):
        gradients, fp8, loss = accumulate(
            loss_fn, self._graph, state.params, state.fp8, batch, self._dtype
        )
        num_tokens = batch[1].size * lax.axis_size("dp")
        gradients = mean(gradients, self._specs.params, num_tokens)
        return gradients, fp8, loss / num_tokens

    def _evaluate(self, state, inputs, targets):
        model = assemble(self._graph, state.params, state.fp8, self._dtype)
        losses = lax.map(lambda batch: language_loss(model, *batch), (inputs, targets))
        return lax.pmean(losses.sum() / targets.size, "dp")


def _specs(shapes: State, optimizer: optax.GradientTransformation) -> State:
    """Returns the sharding of each array; Adam's moments are sharded as parameters."""

    def specs_of(state: nnx.State) -> nnx.State:
        variables = jax.tree.leaves(
            state, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        specs = [variable.spec for variable in variables]
        return jax.tree.unflatten(jax.tree.structure(state), specs)

    params = specs_of(shapes.params)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        shapes.optimizer,
        params,
        transform_non_params=lambda _: PartitionSpec(),
    )
    return State(params, moments, specs_of(shapes.fp8))
