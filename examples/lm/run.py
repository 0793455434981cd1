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
from lm.history import History, speedup
from lm.model import Sizes
from lm.plot import plot
from lm.text import batch, read_standard_library
from lm.train import State, Trainer, make_mesh, make_optimizer

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
RECIPES = {
    None: None,
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
            jax.block_until_ready(self.trainer.linear_layers(self.state.params, *data))
        begin = time.perf_counter()
        jax.block_until_ready(self.trainer.linear_layers(self.state.params, *data))
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
    validation = float(runs[0].trainer.evaluate(runs[0].state.params, *data))
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
    methods = [args.method]
    if args.compare and args.method != "xla":
        methods.append("xla")
    trainers = [
        Trainer(
            sizes,
            mesh=mesh,
            method=method,
            dtype=jnp.dtype(DTYPES[args.dtype]),
            optimizer=make_optimizer(args.learning_rate),
            # The copy with XLA's collectives shows the loss without FP8.
            fp8=RECIPES[args.fp8] if method == args.method else None,
        )
        for method in methods
    ]
    first, state = 0, None
    if args.resume is not None:
        first, state = checkpoints.restore(args.resume, trainers[0].shapes)
        if first >= args.steps:
            raise SystemExit(
                f"--resume: step {first} is done already. Give --steps above {first}."
            )
        say(f"resumed after step {first}, at tp={args.tp}, dp={args.dp}")
    else:
        state = trainers[0].init(jax.random.key(args.seed))
    # A step donates its state, so each run needs a separate copy.
    return first, [
        Run(
            trainer,
            jax.tree.map(jnp.copy, state),
            "xla" if method == "xla" else f"jax_ub ({describe(args, method)})",
        )
        for trainer, method in zip(trainers, methods, strict=True)
    ]


def describe(args: argparse.Namespace, method: str) -> str:
    """Returns the method, and the FP8 recipe if there is one."""
    return method if args.fp8 is None else f"{method}, FP8 {args.fp8}"


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
    mine = histories[0]
    final = np.mean(mine.losses[-10:])
    say(
        f"loss {final:.3f} nats (mean of the last 10 steps), validation "
        f"{validation:.3f}, entropy of byte frequencies {entropy:.3f}"
    )
    for history in histories:
        say(f"{history.name}: {history.describe_times()}")
    if len(histories) == 2:
        low, median, high = speedup(*histories)
        say(
            f"{mine.name} is {median:.2f} times as fast as xla "
            f"({low:.2f} to {high:.2f}: quartiles over the steps, taken in turns)"
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
