"""Measures the fastest method for each linear layer, and writes the results to a file.

With `initialize_ub(ub_cfgs="FILE")` or `JAX_UB_TUNED=FILE`, method "auto" uses these
results for the tuned sizes. Running without overlap is one of the candidates.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from jax_ub._src.dtypes import BY_SHORT_NAME
from jax_ub._src.errors import UbError, UnsupportedOverlapError
from jax_ub._src.methods import Method, MethodChoice, PallasTiles
from jax_ub._src.output import format_row
from jax_ub._src.primitives import pallas
from jax_ub._src.runtime import cuda_engine, settings, tuned_file
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, TunedKey, environment
from jax_ub._src.tools import command_line, devices
from jax_ub._src.tools.command_line import (
    Shape,
    check_divides,
    list_of,
    name_of,
    names_of,
    parse_shape,
    positive,
    replaced_path,
)
from jax_ub._src.tools.launch.parts import count
from jax_ub._src.tools.models import MODELS
from jax_ub._src.tools.programs import DEFAULT_SHAPES, PALLAS, fastest_pallas
from jax_ub._src.tools.timing import Candidate, interleave
from jax_ub._src.tools.tune.cases import candidates, cases, dgrad_of, function, programs

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
    shapes = "global sizes MxKxN of column layers, such as 512x1024x2816; the row "
    shapes += "layer after each is MxNxK (default: the shapes of bench)"
    add("--shapes", type=list_of(parse_shape), help=shapes)
    linears = f"instead of --shapes: the linear layers of {', '.join(MODELS)}"
    add("--model", type=name_of(MODELS), help=linears)
    add("--tokens", type=positive, help=f"M of --model (default: {_TOKENS})")
    rounds = "timed calls of each candidate (default: 9)"
    add("--rounds", type=positive, default=9, help=rounds)
    kernel = 'on GPUs, let "auto" run an AG+GEMM by JAX\'s Pallas kernel where it is '
    kernel += "the fastest; its waits have no deadline (docs/tune.md)"
    add("--allow-pallas", action="store_true", help=kernel)
    platform = "(default: GPUs if JAX has enough)"
    add("--platform", choices=("cpu", "cuda"), help=platform)
    command_line.add_json(parser, "the choices and times of this run")
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Times all methods for each op and size; prints and stores the fastest ones."""
    command_line.check_json_differs("tune", given, "output")
    shapes = _shapes(given)
    for shape, num_ranks in itertools.product(shapes, given.tp):
        check_divides("tune", shape, num_ranks, "--tp")
    dtypes = [BY_SHORT_NAME[name] for name in given.dtypes]
    if given.allow_pallas:
        _check_has_pallas(given.tp, dtypes)
    is_cuda = _start(given.platform, given.tp)
    if given.allow_pallas and not is_cuda:
        raise UnsupportedOverlapError(
            "tune: --allow-pallas allows a kernel for GPUs, but the platform is cpu. "
            "Leave it out."
        )
    here = environment()
    _read_output(given)  # fails before anything is measured
    found: dict[TunedKey, tuple[MethodChoice, dict[str, float]]] = {}
    command_line.say(given, f"jax_ub tune on {here}\n\n{_row(_HEADER)}")
    wanted = dict.fromkeys(
        case
        for num_ranks, dtype, shape in itertools.product(given.tp, dtypes, shapes)
        for case in cases(shape, num_ranks, dtype, is_cuda)
    )
    num_candidates = 0
    for case in command_line.progress("tune", list(wanted)):
        # The gradients of a column-parallel layer contain its dgrad, a GEMM +
        # reduce-scatter. `cases` yields the dgrad as a separate case before, so its
        # fastest method is known here.
        dgrad = found[dgrad_of(case)][0] if case.op == COLUMN_GRADIENTS else None
        choices = candidates(case, is_cuda, dgrad)
        num_candidates += len(choices)
        measured = measure(case, choices, given.rounds)
        best = measured.best(allow_pallas=given.allow_pallas)
        found[case] = (best, measured.times_us)
        tunings = _read_output(given)  # again: other runs of `tune` may add entries
        tunings[here] = tunings.get(here, {}) | found
        tuned_file.write(given.output, tunings)
        command_line.say(given, _row((*dataclasses.astuple(case), measured.text(best))))
        if measured.pallas is not None and best.pallas is None:
            peer_us = measured.times_us[PALLAS]
            command_line.say(given, f"    {PALLAS}: {peer_us:.0f} us, for comparison")
        for choice, reason in measured.failed.items():
            command_line.say(given, f"    {choice} cannot run: {reason}")
    if any(found[case][0].pallas for case in wanted):
        flag = settings.COLLECTIVES_IN_ORDER
        text = f'\n"auto" runs JAX\'s Pallas kernel only with {flag} in XLA_FLAGS'
        command_line.say(given, text)
    # An additional, untimed run compiles each candidate, hence `rounds + 1`.
    command_line.say(
        given,
        f"\nran {num_candidates} candidates of {len(wanted)} cases {given.rounds + 1} "
        f"times each\nwrote {given.output}",
    )
    command_line.write(given, tuned_file.as_json({here: found}))
    return 0


def _check_has_pallas(tp, dtypes):
    """Raises an error if JAX's Pallas kernel can run none of the cases to tune."""
    reason = ""
    if set(tp) == {1}:
        reason = "--tp 1 tunes GEMMs without communication"
    elif not set(dtypes) & set(pallas.DTYPES):
        reason = f"its kernel multiplies {' and '.join(pallas.DTYPES)} only"
    if reason:
        raise UnsupportedOverlapError(
            f"tune: --allow-pallas has no effect, because {reason}. Leave it out."
        )


def _read_output(given):
    if not given.output.exists():
        return {}
    return tuned_file.read(given.output, "Delete it, or name another file in --output")


def _row(cells):
    return format_row(cells, _WIDTHS, right=range(1, 5))


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
    # `cases` takes the sizes of a column-parallel layer, and derives those of the
    # row-parallel layer that follows. To tune a row-parallel layer [M, K, N], the
    # column-parallel layer [M, N, K] is returned.
    return [
        shape if layer.op == "all_gather_matmul" else shape.row
        for layer in MODELS[given.model]
        for shape in [layer.shape(given.tokens or _TOKENS)]
    ]


def _start(wanted, tp) -> bool:
    """Starts JAX with max(tp) devices. Returns whether they are GPUs."""
    num_devices = max(tp)
    devices.start("tune", num_devices, wanted)
    num_found = 0 if wanted == "cpu" else len(cuda_engine.local_devices())
    if num_found >= num_devices:
        return True
    if wanted == "cuda" or num_found:
        raise UnsupportedOverlapError(
            f"tune: --tp {num_devices} needs as many GPUs, but jax has {num_found} "
            "CUDA devices here. Take a smaller --tp, or --platform cpu."
        )
    if 1 in tp:
        raise UnsupportedOverlapError(
            "tune: --tp 1 tunes the GEMMs of one GPU. CPUs have nothing to tune "
            "for one rank. Use --tp 2 or more."
        )
    return False


@dataclasses.dataclass(frozen=True)
class Measured:
    """The median times of all method choices for one op and size.

    Attributes:
        seconds: the median seconds per call of each choice, including its dispatch,
            fastest first.
        failed: the error texts of programs that failed to run.
        pallas: the median seconds of JAX's Pallas kernel and its fastest tiles; None if
            it did not run.
    """

    seconds: dict[MethodChoice, float]
    failed: dict[MethodChoice | str, str]
    pallas: tuple[float, PallasTiles] | None = None

    @property
    def times_us(self) -> dict[str, float]:
        """Returns the median time of each program in microseconds, by name."""
        times = {str(choice): 1e6 * each for choice, each in self.seconds.items()}
        return times if self.pallas is None else {**times, PALLAS: 1e6 * self.pallas[0]}

    def best(self, *, allow_pallas: bool) -> MethodChoice:
        """Returns the fastest method and options for this op and size.

        If JAX's kernel is faster and allowed, the choice has the kernel's tiles, and
        its method runs the calls that the kernel cannot run.
        """
        choice, choice_s = next(iter(self.seconds.items()))
        if not allow_pallas or self.pallas is None or self.pallas[0] >= choice_s:
            return choice
        return dataclasses.replace(choice, pallas=self.pallas[1])

    def text(self, best: MethodChoice) -> str:
        """Describes `best`: the method, its time, and its speed relative to XLA."""
        by_pallas = None if best.pallas is None else self.pallas
        best_s = self.seconds[best] if by_pallas is None else by_pallas[0]
        xla_s = self.seconds.get(MethodChoice(Method.XLA))
        faster = ""
        if xla_s is not None and (by_pallas or best.method is not Method.XLA):
            faster = f", {xla_s / best_s:.2f} times as fast as xla"
        return f"{best}: {1e6 * best_s:.0f} us{faster}"


def measure(case: TunedKey, choices: Sequence[MethodChoice], rounds: int) -> Measured:
    """Times all method choices of one op and size, in interleaved rounds.

    On GPUs, an AG+GEMM is compared with JAX's own kernel in the same rounds.
    """
    made = programs(case)
    running: list[Candidate] = []
    failed: dict[MethodChoice | str, str] = {}
    for choice in choices:
        candidate = made(str(choice), function(case, choice), choice)
        try:
            candidate()  # compiles it
        except UbError as error:
            failed[choice] = str(error)
        else:
            running.append(candidate)
    tiles: PallasTiles | None = None
    if case.op == "all_gather_matmul" and made.ranks.platform != "cpu":
        kernel = fastest_pallas(made, Shape(case.M, case.K, case.N), case.dtype)
        if isinstance(kernel, str):
            failed[PALLAS] = kernel
        else:
            candidate, tiles = kernel
            running.append(candidate)
    found = interleave(running, rounds).seconds
    medians = {each.variant: statistics.median(found[each.name]) for each in running}
    pallas = None if tiles is None else (medians.pop(tiles), tiles)
    ordered = dict(sorted(medians.items(), key=lambda item: item[1]))
    return Measured(ordered, failed, pallas)
