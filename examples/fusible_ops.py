"""A transformer block of fusible operations, trained fused and unfused side by side.

    python examples/fusible_ops.py

Prints how the operations of the block are fused, forward and backward. Then trains two
copies of the model with the same parameters and data, one step of each in turn: one
fused, and one with every operation run separately. Finally prints time and memory of a
step of both.
"""

import argparse
import dataclasses
import os
import statistics
import time

# Threads of jaxlib's pools, at least 4 per device. jaxlib reads it when JAX starts.
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub import ops

AXIS = "tp"
TOKENS = P(None, AXIS)  # [batch, tokens]; also activations outside of linear pairs


@dataclasses.dataclass(frozen=True, repr=False)
class CausalAttention(ops.BasicOperation):
    """Causal attention over this rank's heads, as an example of a custom operation.

    Takes `[batch, tokens, heads * 3 * head_dim]`, with q, k and v of each head next to
    each other. Saves only its input; the backward pass recomputes the attention.
    """

    head_dim: int

    def saved(self, needs):
        """Returns the names of the saved residuals: only the input."""
        return frozenset({"x"})

    def forward(self, params, x, extra_inputs, saves):
        """Computes the attention, `[batch, tokens, heads * head_dim]`."""
        return self.attend(x), (), {"x": x}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Recomputes the attention and applies JAX's derivative."""
        _, transposed = jax.vjp(self.attend, residuals["x"])
        return transposed(dy)[0], {}, ()

    def attend(self, x: jax.Array) -> jax.Array:
        """Splits q, k and v and computes causal dot-product attention."""
        q, k, v = jnp.moveaxis(x.reshape(*x.shape[:2], -1, 3, self.head_dim), 3, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(
            *x.shape[:2], -1
        )


def block(width: int, head_dim: int) -> ops.Sequential:
    """Returns attention and MLP, each with a norm and a residual connection."""

    def linear(name, inputs, outputs, mode, **options):
        return ops.Linear(
            inputs,
            outputs,
            tensor_parallel_mode=mode,
            sequence_parallel=True,
            userbuffers_options={"comm_name": name},
            **options,
        )

    def residual(name, *inside):
        begin = ops.MakeExtraOutput().with_extra_output_channel(0, name, False)
        end = ops.AddExtraInput(in_place=True).with_extra_input_channel(0, name)
        return [begin, ops.RMSNorm(width), *inside, end]

    return ops.Sequential(
        *residual(
            "attention",
            linear("qkv", width, 3 * width, "column", use_bias=False),
            CausalAttention(head_dim),
            linear("proj", width, width, "row"),
        ),
        *residual(
            "mlp",
            linear("fc1", width, 4 * width, "column"),
            ops.GELU(),
            linear("fc2", 4 * width, width, "row"),
        ),
    )


class Model:
    """Transformer blocks with a tied embedding, on a mesh of `tp` devices."""

    def __init__(self, flags: argparse.Namespace):
        self.block = block(flags.width, flags.head_dim)
        self.norm = ops.Sequential(ops.RMSNorm(flags.width))
        self.layers, self.vocabulary = flags.layers, flags.vocabulary
        self.width = flags.width
        self.optimizer = optax.adam(flags.learning_rate)
        devices = jax.devices()[: flags.tp]
        if len(devices) < flags.tp:
            raise SystemExit(
                f"--tp {flags.tp} needs as many devices, but jax has {len(devices)}: "
                f"give --tp {len(devices)} or fewer"
            )
        self.mesh = Mesh(np.array(devices), (AXIS,))

    def init(self, key: jax.Array):
        """Returns the initial parameters and the optimizer's state."""
        keys = jax.random.split(key, self.layers + 1)
        shape = (self.vocabulary, self.width)
        params = {
            "embedding": jax.random.normal(keys[0], shape),
            "norm": self.norm.init(keys[0]),
            "blocks": [self.block.init(key) for key in keys[1:]],
        }
        return params, self.optimizer.init(params)

    def loss(self, params, tokens, targets):
        """Returns the cross entropy, averaged over the tokens of all ranks."""
        x = params["embedding"][tokens]
        for own in params["blocks"]:
            x = self.block(own, x)
        x = self.norm(params["norm"], x) * self.width**-0.5
        logits = x @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return lax.pmean(jnp.mean(losses), AXIS)

    def step(self):
        """Returns a jitted step: (params, state, *batch) -> (params, state, loss)."""
        blocks = [self.block.specs()] * self.layers
        params = {"embedding": P(), "norm": self.norm.specs(), "blocks": blocks}
        # Adam's moments are sharded like the parameters.
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        state = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, spec: spec,
            shapes[1],
            params,
            transform_non_params=lambda _: P(),
        )

        def update(params, state, tokens, targets):
            loss, grads = jax.value_and_grad(self.loss)(params, tokens, targets)
            updates, state = self.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        mapped = jax.shard_map(
            update,
            mesh=self.mesh,
            in_specs=(params, state, TOKENS, TOKENS),
            out_specs=(params, state, P()),
        )
        return jax.jit(mapped, donate_argnums=(0, 1))


def batch(key: jax.Array, flags: argparse.Namespace):
    """Returns random tokens and targets, a fixed permutation of the vocabulary."""
    shape = (flags.batch, flags.tokens)
    tokens = jax.random.randint(key, shape, 0, flags.vocabulary)
    next_one = jax.random.permutation(jax.random.key(2), flags.vocabulary)
    return tokens, next_one[tokens]


def train(model: Model, flags: argparse.Namespace) -> None:
    """Trains both copies, one step of each in turn."""
    keys = jax.random.split(jax.random.key(1), flags.steps)
    programs, memory, copies = {}, {}, {}
    for name in ("fused", "unfused"):
        copies[name] = model.init(jax.random.key(0))
        arguments = (*copies[name], *batch(keys[0], flags))
        if name == "fused":
            lowered = model.step().lower(*arguments)
        else:
            with ops.without_fusions():
                lowered = model.step().lower(*arguments)
        programs[name] = lowered.compile()
        memory[name] = programs[name].memory_analysis().temp_size_in_bytes
        # Place inputs in the compiled program's shardings; its results have the same.
        shardings = programs[name].input_shardings[0][:2]
        copies[name] = jax.device_put(copies[name], shardings)

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for place, key in enumerate(keys):
        data = batch(key, flags)
        losses = {}
        for name, program in programs.items():
            inputs = jax.device_put(data, program.input_shardings[0][2:])
            start = time.perf_counter()
            *copies[name], losses[name] = jax.block_until_ready(
                program(*copies[name], *inputs)
            )
            seconds[name].append(time.perf_counter() - start)
        if place % 10 == 0 or place == flags.steps - 1:
            print(
                f"step {place:3d}: loss {losses['fused']:.4f} fused, "
                f"{losses['unfused']:.4f} unfused"
            )

    # The first step warms up, and counts only if there is no other.
    median = {name: statistics.median(s[1:] or s) for name, s in seconds.items()}
    print("\n           ms a step   temporary MB a device")
    for name in programs:
        print(f"{name:8}   {1e3 * median[name]:9.1f}   {memory[name] / 1e6:21.2f}")
    print(
        f"\nunfused / fused: {median['unfused'] / median['fused']:.2f} times the time"
    )


def parse_flags() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name, default, meaning in (
        ("--tp", 4, "devices that share the model"),
        ("--steps", 31, "training steps"),
        ("--batch", 2, "sequences per step"),
        ("--tokens", 256, "tokens per sequence"),
        ("--width", 256, "features of a token"),
        ("--head-dim", 32, "features of an attention head"),
        ("--layers", 2, "transformer blocks"),
        ("--vocabulary", 64, "different tokens"),
        ("--learning-rate", 2e-3, "learning rate of the optimizer"),
    ):
        text = f"{meaning} (default: {default})"
        add(name, type=type(default), default=default, help=text)
    flags = parser.parse_args()
    check(flags, parser)
    return flags


def check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with a message that names the flag to change, and a value that works."""
    for name, value in vars(flags).items():
        if value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value} is not positive")
    heads = flags.tp * flags.head_dim
    for name, size, unit, why in (
        ("--tokens", flags.tokens, flags.tp, "a device has an equal share of them"),
        ("--width", flags.width, heads, "a device has whole heads of --head-dim"),
    ):
        if size % unit:
            parser.error(
                f"{name} {size} is no multiple of {unit}, but of --tp {flags.tp} "
                f"devices {why}: give {-(-size // unit) * unit}, for example"
            )


def main() -> None:
    """Prints how the block is fused, and trains it."""
    flags = parse_flags()
    if jax.config.jax_platforms == "cpu" or not jax.config.jax_platforms:
        jax.config.update("jax_num_cpu_devices", flags.tp)
    model = Model(flags)
    plan = model.block.explain(flags.batch * flags.tokens, num_ranks=flags.tp)
    print(f"{plan}\n")
    train(model, flags)


if __name__ == "__main__":
    main()
