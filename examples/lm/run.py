"""Trains the model and a copy with XLA's collectives, and compares them."""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_ub as ub
from lm.checkpoint import Checkpoints
from lm.model import Recipe, Sizes
from lm.plot import History, plot, speedup
from lm.text import batch, read_standard_library
from lm.train import State, Trainer, make_mesh, make_optimizer

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
RECIPES = {
    "delayed": ub.fp8.DelayedScaling(),
    "current": ub.fp8.Float8CurrentScaling(),
    "mxfp8": ub.fp8.MXFP8BlockScaling(),
    "rowwise": ub.fp8.RowwiseScaling(),
}


class Run:
    """A trainer with its state and recorded history."""

    def __init__(self, trainer: Trainer, state: State, name: str):
        """Starts from `state`, which the first step donates."""
        self.trainer, self.state, self.history = trainer, state, History(name)

    def step(self, number: int, data: tuple[np.ndarray, np.ndarray]) -> None:
        """Runs and times one training step."""
        begin = time.perf_counter()
        self.state, loss = self.trainer.step(self.state, *data)
        loss = float(loss)  # waits for the step
        self.history.steps_s.append(time.perf_counter() - begin)
        self.history.steps.append(number)
        self.history.losses.append(loss)

    def time_linear_layers(self, data: tuple[np.ndarray, np.ndarray]) -> None:
        """Times the linear layers of a step; the first call also compiles them."""
        if not self.history.linear_s:
            jax.block_until_ready(self.trainer.linear_layers(self.state, *data))
        begin = time.perf_counter()
        jax.block_until_ready(self.trainer.linear_layers(self.state, *data))
        self.history.linear_s.append(time.perf_counter() - begin)


def say(*words: object) -> None:
    """Prints in process 0."""
    if jax.process_index() == 0:
        print(*words)


def run(args: argparse.Namespace) -> None:
    """Trains as the flags specify; writes the plot, its numbers, and checkpoints."""
    begin = time.perf_counter()
    if args.distributed:
        jax.distributed.initialize()
    text = read_standard_library()
    say(
        f"text: {len(text.train) / 1e6:.1f} MB of Python's standard library, "
        f"entropy of byte frequencies {text.entropy:.3f} nats"
    )
    sizes = Sizes(args.d_model, args.d_ff, args.layers, args.heads)
    checkpoints = args.checkpoint_dir and Checkpoints(args.checkpoint_dir, sizes)
    first, runs = start(args, sizes, checkpoints)
    shape = (args.microbatches, args.batch // args.microbatches, args.seq_len)

    quiet = jax.process_index() > 0
    steps = range(first, args.steps)
    # In a log, which is not a terminal, a line every ten seconds is enough.
    live = sys.stderr.isatty()
    bar = tqdm(
        steps,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.1 if live else 10,
        disable=quiet,
    )
    with bar:
        for step in bar:
            data = batch(text.train, shape, (args.seed, step))
            # The order of the runs alternates, so that noise affects both equally.
            turns = runs if step % 2 else runs[::-1]
            for each in turns:
                each.step(step, data)
            if (step - first) % args.time_linear_every == 0:
                for each in turns:
                    each.time_linear_layers(data)
            bar.set_postfix_str(progress(runs, tokens=data[0].size), refresh=live)
            if checkpoints and (
                step + 1 == args.steps or (step + 1) % args.checkpoint_every == 0
            ):
                checkpoints.save(step + 1, runs[0].state)
    if checkpoints:
        checkpoints.close()

    for fallback in dict.fromkeys(ub.fallbacks()):
        say(f"not overlapped: {fallback.label}: {fallback.reason}")
    data = batch(text.validation, (8, *shape[1:]), (args.seed,))
    validation = float(runs[0].trainer.evaluate(runs[0].state, *data))
    report(args, [each.history for each in runs], text.entropy, validation)
    say(f"all of it took {time.perf_counter() - begin:.0f} s")


def start(
    args: argparse.Namespace, sizes: Sizes, checkpoints: Checkpoints | None
) -> tuple[int, list[Run]]:
    """Creates the run and its copy with the same initial or restored state."""
    mesh = make_mesh(args.dp, args.tp)
    # Capacity: a call communicates at most the tokens of a replica's microbatch.
    num_tokens = args.batch // args.microbatches // args.dp * args.seq_len
    ub.initialize_ub((num_tokens, args.d_model), args.tp, mesh=mesh)
    trainers = {
        name: Trainer(
            sizes,
            mesh=mesh,
            method=method,
            dtype=jnp.dtype(DTYPES[args.dtype]),
            optimizer=make_optimizer(args.learning_rate),
            fp8=fp8,
        )
        for name, method, fp8 in variants(args)
    }
    # A step donates its state, so each run has a separate one. Equal seeds initialize
    # equal parameters.
    states = [each.init(jax.random.key(args.seed)) for each in trainers.values()]
    first = 0
    if args.resume is not None:
        shapes = next(iter(trainers.values())).shapes
        first, restored = checkpoints.restore(args.resume, shapes)
        if first >= args.steps:
            raise SystemExit(
                f"--resume: step {first} is done already. Give --steps above {first}."
            )
        say(f"resumed after step {first}, at tp={args.tp}, dp={args.dp}")
        copies = [jax.tree.map(jnp.copy, restored) for _ in states[1:]]
        others = zip(copies, states[1:], strict=True)
        states = [restored, *(copy._replace(fp8=new.fp8) for copy, new in others)]
    named = zip(trainers.items(), states, strict=True)
    return first, [Run(trainer, state, name) for (name, trainer), state in named]


def variants(args: argparse.Namespace) -> list[tuple[str, str, Recipe | None]]:
    """Returns the name, the method and the FP8 recipe of each run.

    The copy with XLA's collectives is the last one, and shows the loss without FP8.
    """
    xla = ("xla", "xla", None)
    if args.fp8:
        found = [
            (f"jax_ub ({args.method}, FP8 {name})", args.method, RECIPES[name])
            for name in args.fp8
        ]
    elif args.method == "xla":
        return [xla]
    else:
        found = [(f"jax_ub ({args.method})", args.method, None)]
    return [*found, xla] if args.compare else found


def progress(runs: list[Run], tokens: int) -> str:
    """Returns the text of the progress bar."""
    mine = runs[0].history
    losses = [f"{each.history.name} {each.history.losses[-1]:.3f}" for each in runs]
    return (
        f"loss {', '.join(losses)}; {tokens / mine.steps_s[-1]:.0f} tokens/s; linear "
        f"layers {1e3 * mine.linear_s[-1]:.0f} of {1e3 * mine.steps_s[-1]:.0f} ms"
    )


def report(
    args: argparse.Namespace,
    histories: list[History],
    entropy: float,
    validation: float,
) -> None:
    """Prints the comparison; writes the plot and a JSON file of the numbers."""
    final = histories[0].final_loss
    say(
        f"loss {final:.3f} nats (mean of the last 10 steps), validation "
        f"{validation:.3f}, entropy of byte frequencies {entropy:.3f}"
    )
    for history in histories:
        say(f"{history.name}: {history.describe_times()}")
    *ours, xla = histories
    for mine in ours if xla.name == "xla" else []:
        low, median, high = speedup(mine, xla)
        say(
            f"{mine.name} is {median:.2f} times as fast as xla "
            f"({low:.2f} to {high:.2f}: quartiles over the steps, taken in turns); its "
            f"loss differs by {mine.final_loss / xla.final_loss - 1:+.2%}"
        )
    if jax.process_index() > 0:
        return
    path = pathlib.Path(args.plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(path, histories, entropy)
    numbers = {
        "flags": vars(args),
        "entropy": entropy,
        "validation": validation,
        "runs": [dataclasses.asdict(history) for history in histories],
    }
    path.with_suffix(".json").write_text(json.dumps(numbers, indent=1))
    say(f"wrote {path} and {path.with_suffix('.json')}")
