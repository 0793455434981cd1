"""Measures the fastest method for each linear layer, and writes the results to a file.

With `initialize_ub(ub_cfgs="FILE")` or `JAX_UB_TUNED=FILE`, method "auto" uses these
results for the tuned sizes. Running without overlap is one of the candidates.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from jax_ub._src.config import tuned_file
from jax_ub._src.config.tuned_file import COLUMN_GRADIENTS, TunedKey
from jax_ub._src.dtypes import BY_SHORT_NAME
from jax_ub._src.errors import UbError, UnsupportedOverlapError
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.runtime import cuda_engine
from jax_ub._src.runtime.tuned_tables import environment
from jax_ub._src.tables import format_row
from jax_ub._src.tools import console, devices
from jax_ub._src.tools.bench.cases import DEFAULT_SHAPES, PALLAS
from jax_ub._src.tools.launch.parts import count
from jax_ub._src.tools.options import (
    Shape,
    check_divides,
    list_of,
    name_of,
    names_of,
    parse_shape,
    positive,
    replaced_path,
)
from jax_ub._src.tools.simulate import models
from jax_ub._src.tools.timing import Candidate, interleave
from jax_ub._src.tools.tune.cases import Operands, candidates, cases, dgrad_of

EXAMPLE = "tune --tp 2 --shapes 512x1024x2816 --output tuned.json"
_TOKENS = 8192
_HEADER = ("op", "P", "M", "K", "N", "dtype", "best")
_WIDTHS = (22, 2, 6, 6, 6, 9, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    output = "the file; its entries for other devices and sizes are kept"
    add("--output", type=replaced_path, required=True, help=output)
    tp = "numbers of ranks P, such as 2,4 (default: 2); 1 tunes the GEMMs of a GPU"
    add("--tp", type=list_of(count), default=(2,), help=tp)
    dtypes = f"some of {','.join(BY_SHORT_NAME)} (default: bf16)"
    add("--dtypes", type=names_of(BY_SHORT_NAME), default=("bf16",), help=dtypes)
    shapes = "global sizes MxKxN of column linears, such as 512x1024x2816; the row "
    shapes += "linear after each is MxNxK"
    add("--shapes", type=list_of(parse_shape), help=shapes)
    linears = f"instead of --shapes: the linears of {', '.join(models.MODELS)}"
    add("--model", type=name_of(models.MODELS), help=linears)
    add("--tokens", type=positive, help=f"M of --model (default: {_TOKENS})")
    rounds = "timed calls of each candidate (default: 9)"
    add("--rounds", type=positive, default=9, help=rounds)
    platform = "(default: GPUs if JAX has enough)"
    add("--platform", choices=("cpu", "cuda"), help=platform)
    console.add_json(parser, "the choices and times of this run")
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Times all candidates of each case, prints the fastest and updates the file.

    The file is written after each case. Entries for other devices and sizes are kept.
    """
    shapes = _shapes(given)
    for shape, num_ranks in itertools.product(shapes, given.tp):
        check_divides("tune", shape, num_ranks, "--tp")
    is_cuda = _start(given.platform, given.tp)
    here = environment()
    tunings = tuned_file.read(given.output) if given.output.exists() else {}
    found = tunings.setdefault(here, {})
    console.say(given, f"jax_ub tune on {here}\n\n{_row(_HEADER)}")
    wanted = dict.fromkeys(
        case
        for num_ranks, name, shape in itertools.product(given.tp, given.dtypes, shapes)
        for case in cases(shape, num_ranks, BY_SHORT_NAME[name], is_cuda)
    )
    num_candidates = 0
    for case in console.progress("tune", list(wanted)):
        # `cases` yields the GEMM+RS of the dgrad first, so its result is known here.
        dgrad = found[dgrad_of(case)][0] if case.op == COLUMN_GRADIENTS else None
        choices = candidates(case, is_cuda, dgrad)
        num_candidates += len(choices)
        seconds, failed, peers = measure(case, choices, given.rounds)
        best = next(iter(seconds))
        times_us = {str(choice): 1e6 * each for choice, each in seconds.items()}
        times_us |= {name: 1e6 * each for name, each in peers.items()}
        found[case] = (best, times_us)
        tuned_file.write(given.output, tunings)
        console.say(given, _row((*dataclasses.astuple(case), _result(seconds))))
        for name, peer_s in peers.items():
            console.say(given, f"    {name}: {1e6 * peer_s:.0f} us, for comparison")
        for choice, reason in failed.items():
            console.say(given, f"    {choice} cannot run: {reason}")
    # Each candidate runs `rounds + 1` times, because the first run compiles it.
    console.say(
        given,
        f"\nran {num_candidates} candidates of {len(wanted)} cases {given.rounds + 1} "
        f"times each\nwrote {given.output}",
    )
    measured = {here: {case: found[case] for case in wanted}}
    console.write(given, tuned_file.as_json(measured))
    return 0


def _row(cells):
    return format_row(cells, _WIDTHS, right=range(1, 5))


def _result(seconds):
    """Returns the fastest choice, its time, and its speed relative to plain XLA."""
    best, *_ = seconds
    xla_s = seconds.get(MethodChoice(Method.XLA))
    is_overlapped = xla_s is not None and best.method is not Method.XLA
    faster = f", {xla_s / seconds[best]:.2f} times as fast as xla"
    return f"{best}: {1e6 * seconds[best]:.0f} us{faster if is_overlapped else ''}"


def _shapes(given) -> Sequence[Shape]:
    if given.model is None:
        if given.tokens is not None:
            raise UnsupportedOverlapError(
                f"tune: --tokens {given.tokens} is the M of a --model. Add --model."
            )
        return given.shapes or DEFAULT_SHAPES
    if given.shapes is not None:
        raise UnsupportedOverlapError(
            "tune: --shapes and --model exclude each other. Leave one of them out."
        )
    # `cases` takes the sizes of a column linear layer and derives the row linear layer
    # after it. For a row layer [M, K, N], this is the column layer [M, N, K].
    layers = models.MODELS[given.model]
    return [
        shape if layer.op == "all_gather_matmul" else shape.row
        for layer in layers
        for shape in [Shape(given.tokens or _TOKENS, layer.K, layer.N)]
    ]


def _start(wanted, tp) -> bool:
    """Starts JAX's backend with max(tp) devices; returns whether it has GPUs."""
    num_devices = max(tp)
    devices.start("tune", num_devices, wanted)
    num_found = 0 if wanted == "cpu" else len(cuda_engine.local_devices())
    if num_found >= num_devices:
        return True
    if wanted == "cuda" or num_found:
        raise UnsupportedOverlapError(
            f"tune: jax has {num_found} CUDA devices here, and P = {num_devices} was "
            "asked for. Take a smaller --tp, or --platform cpu."
        )
    if 1 in tp:
        raise UnsupportedOverlapError(
            "tune: --tp 1 tunes the GEMMs of one GPU. CPUs have nothing to tune "
            "for one rank. Use --tp 2 or more."
        )
    return False


def measure(
    case: TunedKey, choices: Sequence[MethodChoice], rounds: int
) -> tuple[dict[MethodChoice, float], dict[MethodChoice | str, str], dict[str, float]]:
    """Times all method choices of one op and size, in interleaved rounds.

    On GPUs, an AG+GEMM is compared with JAX's own kernel in the same rounds.

    Returns:
        The median seconds per call of each choice, including its dispatch, fastest
        first; the error texts of programs that failed to run; and the median seconds of
        programs that are not choices, by name.
    """
    operands = Operands(case)
    running: list[Candidate] = []
    failed: dict[MethodChoice | str, str] = {}
    for index, choice in enumerate(choices):
        candidate = operands.candidate(str(index), choice)
        try:
            candidate()  # compiles it
        except UbError as error:
            failed[choice] = str(error)
        else:
            running.append(candidate)
    if (
        case.op == "all_gather_matmul"
        and devices.Ranks(case.num_ranks).platform != "cpu"
    ):
        kernel = operands.find_pallas()
        if isinstance(kernel, Candidate):
            running.append(kernel)
        else:
            failed[PALLAS] = kernel
    found = interleave(running, rounds).seconds
    medians = {name: statistics.median(times) for name, times in found.items()}
    peers = {PALLAS: medians.pop(PALLAS)} if PALLAS in medians else {}
    seconds = {choices[int(name)]: each for name, each in medians.items()}
    return dict(sorted(seconds.items(), key=lambda item: item[1])), failed, peers
