"""Trains a byte-level language model with tensor and sequence parallelism.

    python examples/train_lm.py
    python -m jax_ub launch -n 4 examples/train_lm.py --distributed

The text is Python's standard library. Every linear layer's GEMM and communication
is one XLA FFI call, forward and backward. A copy with XLA's collectives is trained
from the same parameters on the same text; at the end, a plot compares the two.
examples/README.md explains the flags and the code in `lm`.
"""

import argparse
import os
import pathlib

METHODS = ("auto", "direct", "ring_exchange", "pipeline", "external", "xla")


def parse_flags() -> argparse.Namespace:
    """Parses the command line and rejects invalid combinations."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model with tensor parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tp", type=int, default=4, help="devices that share a model")
    add("--dp", type=int, default=1, help="replicas that share a batch")
    add(
        "--distributed",
        action="store_true",
        help="use the devices of several processes, see docs/processes.md",
    )
    add("--method", choices=METHODS, default="auto", help="how linear layers overlap")
    add("--steps", type=int, default=100, help="training steps")
    dtypes = ("bf16", "f16", "f32")
    add("--dtype", choices=dtypes, default="bf16", help="dtype of the computation")
    add(
        "--fp8",
        nargs="+",
        choices=("delayed", "current", "mxfp8", "rowwise"),
        help="FP8 recipes of the linear layers in the blocks, each for one copy of the "
        "model; None uses --dtype",
    )
    add("--batch", type=int, default=4, help="sequences per step")
    add("--microbatches", type=int, default=1, help="number of microbatches of a step")
    add("--seq-len", type=int, default=256, help="bytes per sequence")
    add("--d-model", type=int, default=256, help="features of a token")
    add("--d-ff", type=int, default=768, help="features between the layers of an MLP")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--heads", type=int, default=4, help="attention heads")
    add("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="seed of parameters and batches")
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train a copy of the model with --method xla, in alternating steps",
    )
    add(
        "--time-linear-every",
        type=int,
        default=20,
        metavar="STEPS",
        help="how often to time the linear layers of a step separately",
    )
    add("--plot", default="runs/train_lm.png", help="path of the final plot")
    add("--checkpoint-dir", help="directory of checkpoints; None saves none")
    every = "steps from one checkpoint to the next"
    add("--checkpoint-every", type=int, default=100, metavar="STEPS", help=every)
    add(
        "--resume",
        type=int,
        nargs="?",
        const=-1,
        metavar="STEP",
        help="resume from this checkpoint, or the latest; --tp and --dp may differ",
    )
    flags = parser.parse_args()
    check(flags, parser)
    return flags


def check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with a message that names the flag to change, and a value that works."""
    for name, value in vars(flags).items():
        if type(value) is int and value < 1 and name not in ("seed", "resume"):
            parser.error(f"{flag(name)} {value} is too small: give at least 1")
    for divisor, name, why in (
        ("tp", "heads", "a device has whole attention heads"),
        ("tp", "seq_len", "a device has an equal share of the tokens"),
        ("tp", "d_ff", "a device has an equal share of the MLP"),
        ("heads", "d_model", "all heads have the same size"),
        ("microbatches", "batch", "all microbatches have the same size"),
    ):
        a, b = getattr(flags, divisor), getattr(flags, name)
        if b % a:
            parser.error(
                f"{flag(name)} {b} is no multiple of {flag(divisor)} {a}, but {why}: "
                f"give {flag(name)} {-(-b // a) * a}, for example"
            )
    if (flags.batch // flags.microbatches) % flags.dp:
        parser.error(
            f"a microbatch has {flags.batch // flags.microbatches} sequences, which "
            f"--dp {flags.dp} replicas cannot share: give --batch "
            f"{flags.dp * flags.microbatches} or a multiple of that"
        )
    if flags.d_model // flags.heads % 2:
        parser.error(
            f"--d-model {flags.d_model} gives --heads {flags.heads} an odd size, but "
            f"rotary attention takes features in pairs: give --d-model "
            f"{2 * flags.d_model}, for example"
        )
    blocks = 32 * flags.tp  # an MXFP8 scale is of 32 features on one device
    for name in ("d_model", "d_ff") if "mxfp8" in (flags.fp8 or ()) else ():
        size = getattr(flags, name)
        if size % blocks:
            parser.error(
                f"{flag(name)} {size} is no multiple of 32 x --tp {flags.tp}, but "
                "mxfp8 has scales for blocks of 32 features: give "
                f"{flag(name)} {-(-size // blocks) * blocks}"
            )
    if 256 % flags.tp:
        parser.error(f"--tp {flags.tp} does not divide the 256 values of a byte")
    check_checkpoints(flags, parser)


def check_checkpoints(
    flags: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Exits with a message if the flags of checkpoints do not fit."""
    if flags.checkpoint_dir and len(flags.fp8 or ()) > 1:
        parser.error(
            f"--checkpoint-dir saves one copy of the model: give --fp8 {flags.fp8[0]}"
        )
    if flags.resume is not None and not flags.checkpoint_dir:
        parser.error("--resume needs the --checkpoint-dir to resume from")
    folder = pathlib.Path(flags.checkpoint_dir or ".")
    if folder.exists() and not folder.is_dir():
        parser.error(f"--checkpoint-dir {folder} is a file: give a folder")


def flag(name: str) -> str:
    """Returns the command-line flag of an attribute name."""
    return "--" + name.replace("_", "-")


def prepare_jax(flags: argparse.Namespace) -> None:
    """Sets variables that JAX reads on import, unless a launcher has set them.

    The CPU is divided into the devices of the mesh. With --distributed, each process
    has the devices that its launcher gives it, or one. With fewer than two pool threads
    per device, XLA's own collectives deadlock while many steps are in flight. `NPROC`
    sets the number of threads of each pool; four per device are enough.
    """
    num_devices = flags.dp * flags.tp
    os.environ.setdefault("NPROC", str(max(os.cpu_count(), 4 * num_devices)))
    if not flags.distributed:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(num_devices))


def main() -> None:
    """Trains as the flags specify."""
    flags = parse_flags()
    prepare_jax(flags)
    from lm.run import run  # imports jax

    run(flags)


if __name__ == "__main__":
    main()
