"""Implements `Sequential.explain`: which linears overlap after fusion, and why not."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ub._src import checks, methods
from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.ops.basic import AllGather, AllReduce, ReduceScatter
from jax_ub._src.ops.fused_operation import FusedOperation, Op, windows
from jax_ub._src.ops.fuser import OperationFuser, operation_label
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.operation import num_ranks
from jax_ub._src.parallel import COLUMN, CommOverlapType, ParallelMode, mode_of
from jax_ub._src.prediction import estimate as simulate
from jax_ub._src.prediction.hardware import RATE_OF_ITEMSIZE, Hardware
from jax_ub._src.rules.call_config import CallConfig, call_label, plan_call_config
from jax_ub._src.rules.forward import BY_ALL_TO_ALL
from jax_ub._src.runtime import registry
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS
from jax_ub._src.scalars import is_integer
from jax_ub._src.tools.explain import report
from jax_ub._src.tools.explain.report import Row, Table, Waits

_PASSES = ("forward", "backward")
_COLLECTIVES = {
    AllReduce: ("all_reduce", ""),
    AllGather: ("all_gather", "reduce_scatter"),
    ReduceScatter: ("reduce_scatter", "all_gather"),
}
# A GEMM or a collective: (op, contracted size, number of output features).
Step = tuple[str, int, int]
# Maps an op to the steps that replace it if partial sums are sent as FP8, as selected
# by `wire_dtype`.
_SUMS_AS_FP8: dict[str, tuple[str, ...]] = {
    "matmul_reduce_scatter": ("matmul", "all_to_all"),
    "reduce_scatter": ("all_to_all",),
}
# Maps an op to the steps that replace it if a GPU would have to multiply gathered FP8
# rows by non-FP8 operands, which GPUs cannot.
_FP8_ON_GPUS: dict[str, tuple[str, ...]] = {
    "all_gather_matmul": ("all_gather", "matmul")
}
# Ops that are GEMMs without communication.
_GEMMS = ("matmul", "wgrad")
# Collectives that sum the results of GEMMs. With an FP8 recipe, these results are not
# FP8, but the operands of all other ops are.
_SUMS = ("reduce_scatter", "all_reduce")
_FP8 = np.dtype(jnp.float8_e4m3fn)
_GATHERED_AS_FP8 = "its rows are sent as FP8, which GPUs do not multiply by wide arrays"
_REJECTED = (
    "a call is rejected: only all-gathers and reduce-scatters of rows overlap, with "
    "sequence_parallel=True"
)
_check_count = checks.option_check(
    lambda value: value is None or (is_integer(value) and value > 0),
    "a positive integer",
    "Pass one, or leave it out.",
)
_check_dtype = checks.option_check(
    lambda value: checks.dtype_of(value) is not None,
    "a dtype",
    "Pass the dtype of the activations, for example jnp.bfloat16.",
)
_NO_RANKS = (
    "not predicted, because the number of ranks is unknown: pass num_ranks, or call "
    "it under jax.set_mesh"
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Checked arguments of `ops.Sequential.explain`, such as tokens and the machine.

    `Sequential.explain` documents them.
    """

    tokens: int | None
    num_ranks: int | None
    dtype: Any
    machine: Hardware
    waits: Waits

    def __post_init__(self):
        _check_count("explain", "tokens", self.tokens)
        _check_count("explain", "num_ranks", self.num_ranks)
        _check_dtype("explain", "dtype", self.dtype)

    def dtype_of(self, linear: BasicLinear) -> np.dtype:
        return np.dtype(self.dtype if linear.dtype is None else linear.dtype)

    def why_not_predicted(self, linear: BasicLinear) -> str:
        dtype = self.dtype_of(linear)
        if dtype.itemsize in RATE_OF_ITEMSIZE:
            return _NO_RANKS
        return f"{dtype} is not predicted, because the simulator has no rates for it"

    def ranks_on(self, axis_name: str) -> int | None:
        known = self.num_ranks or num_ranks(axis_name)
        sizes = {axis.axis_name: axis.tp_size for axis in registry.axes()}
        return known or sizes.get(axis_tuple(axis_name))


def explain(
    fuser: OperationFuser,
    tokens: int | None,
    num_ranks: int | None,
    dtype: Any,
    hardware: Any,
    trace: Any,
) -> Table:
    """Returns the table of `Sequential.explain`, with reasons for missing overlap."""
    machine, waits = report.find_hardware(hardware), report.read_waits(trace)
    sizes, rows = Sizes(tokens, num_ranks, dtype, machine, waits), []
    passes = {name: _windows(fuser.fused(name)) for name in _PASSES}
    reasons = {name: _unfused_reasons(fuser, name) for name in _PASSES}
    unpredicted: list[str] = []  # the reason of each row without a prediction
    for index, op in enumerate(fuser.basic_ops):
        for name in _PASSES:
            first, window = passes[name][index]
            comm_name = op.comm_name
            named = "" if comm_name is None else f" {shown(comm_name)}"
            scope = f"{index} {op.label}{named}, {name}"
            if isinstance(op, BasicLinear):
                row = _linear(op, name, window, reasons[name].get(index, []), sizes)
                if sizes.tokens is not None and row.predicted_s is None:
                    unpredicted.append(sizes.why_not_predicted(op))
            elif type(op) in _COLLECTIVES and not _overlaps(window):
                row = _collective(op, name)
            else:
                continue
            note = "" if row.note or window is op else _covered(window, first)
            rows.append(dataclasses.replace(row, scope=scope, note=row.note or note))
    title = f"Sequential of {len(fuser.basic_ops)} operations, fused"
    notes = [*_notes(fuser, passes, reasons), *dict.fromkeys(unpredicted)]
    return report.table_on(hardware, rows, title, notes)


def _windows(ops: list[Op]) -> list[tuple[int, Op]]:
    """Returns (start, op) for the operation that runs each basic operation.

    `op` is a fused operation or the basic operation itself. `start` is the index of the
    first basic operation that `op` runs.
    """
    return [(window.start, op) for window, op in windows(ops) for _ in op.basic_ops]


def _unfused_reasons(fuser, name) -> dict[int, list[str]]:
    """Returns {index of a basic operation: reasons why it is not fused}."""
    found: dict[int, list[str]] = {}
    for fusion, before, _ in fuser.fusion_steps(name):
        owner = getattr(fusion, "__self__", None)
        if not (isinstance(owner, type) and issubclass(owner, FusedOperation)):
            continue
        reasons = owner.unfused_reasons(before)
        for i, (window, _) in enumerate(windows(before)):
            if reasons.get(i):
                reason = f"{owner.__name__}: {reasons[i]}"
                found.setdefault(window.start, []).append(reason)
    return found


def _overlaps(window: Op) -> bool:
    return isinstance(window, FusedOperation) and window.overlaps


def _covered(window, first):
    last = first + len(window.basic_ops) - 1
    indices = f"{first}-{last}" if last > first else f"{first}"
    return f"{type(window).__name__} of {indices}"


def _linear(op, name, window, reasons, sizes) -> Row:
    is_fused = _overlaps(window)
    scatters = [o for o in window.basic_ops if isinstance(o, ReduceScatter)]
    is_scattered = is_fused and bool(scatters)  # by a ReduceScatter operation
    parallel = op.tensor_parallel_mode or ("row" if is_scattered else None)
    axis_name = scatters[0].axis_name if is_scattered else op.axis_name
    ranks = 1 if parallel is None else sizes.ranks_on(axis_name)
    mode = mode_of(parallel, op.sequence_parallel or is_scattered)
    is_backward, window_name = name == "backward", type(window).__name__
    config = _planned(
        op, axis_name, mode, ranks, window_name, sizes, is_backward=is_backward
    )
    steps = _steps(op, is_fused, config, is_backward=is_backward)
    targets = list(dict.fromkeys(target for target, _, _ in steps))
    reason = note = ""
    if all(target in _GEMMS for target in targets):
        note = "no communication"
    elif not is_fused:
        reason = "; ".join(reasons) or "no registered fusion overlaps it"
    elif not mode.sequence_parallel:
        reason = _REJECTED
    else:
        reason = _why_sequential(op, config, targets)
    keys = [(config.label, target) for target in targets]
    known = [sizes.waits[key] for key in keys if key in sizes.waits]
    found: list[simulate.Prediction] = []
    if sizes.tokens is not None and ranks is not None:
        if mode.sequence_parallel and sizes.tokens % ranks:
            raise ShapeContractError(
                f"explain: tokens = {sizes.tokens} does not divide into {ranks} ranks, "
                "which the sequence-parallel linears require. Use tokens = "
                f"{checks.round_up(sizes.tokens, ranks)}."
            )
        if sizes.dtype_of(op).itemsize in RATE_OF_ITEMSIZE:
            found = [_estimate(op, config, sizes, ranks, step) for step in steps]
    return Row(
        scope="",
        op=", ".join(targets),
        overlapped=not reason,
        method=config.method.value,
        reason=reason,
        note=note,
        measured_exposed_s=sum(known) if known else None,
        moved_bytes=round(sum(one.moved_bytes for one in found)) if found else None,
        predicted_s=sum(one.seconds for one in found) if found else None,
    )


def _why_sequential(op, config, targets) -> str:
    """Returns why a fused linear layer does not overlap its collective, or ""."""
    if config.method is Method.XLA:
        return 'method "xla" is plain jax.lax'
    if "all_to_all" in targets:
        return BY_ALL_TO_ALL
    if _multiplies_unlike_sent(op, config):
        return _GATHERED_AS_FP8
    if config.method is Method.EXTERNAL:
        return 'method "external" communicates before or after the GEMM'
    return ""


def _estimate(op, config, sizes, ranks, step: Step) -> simulate.Prediction:
    target, k, n = step
    choice, dtype = config.choice, sizes.dtype_of(op)
    if target == "all_to_all":
        # The all-to-all runs in XLA. It is predicted as an all-gather of the same
        # array, in which a rank sends as many bytes.
        target, choice, dtype = "all_gather", MethodChoice(Method.XLA), _FP8
    elif op.fp8 is not None and target not in _SUMS:
        dtype = _FP8
    if target == "wgrad" and config.gathers_first:
        target = "matmul"  # a local GEMM of the same sizes
    return simulate.estimate(
        *(target, choice, sizes.tokens, k, n, ranks),
        dtype,
        sizes.machine,
        gathered_dtype=_FP8 if choice.sends_fp8 else None,
    )


def _planned(op, axis_name, mode, ranks, window_name, sizes, *, is_backward):
    """Returns the `CallConfig` of one pass, with the method tuned for its sizes."""
    axes = () if mode.parallel is None else axis_tuple(axis_name)
    # `initialize_ub` configures an overlap by its name, for a fixed number of ranks. If
    # the number of ranks is unknown here, the name cannot be looked up.
    configured = op.comm_name if ranks is not None else None
    config = plan_call_config(
        *(window_name, axes, ranks or 1, configured, op.chosen_method),
        mode=mode,
        is_fp8=op.fp8 is not None,
    )
    config = dataclasses.replace(config, label=call_label(window_name, op.comm_name))
    if not is_backward:
        return config
    if sizes.tokens is None or mode is not mode_of("column", True):
        return config.dgrad
    return config.dgrad.with_dtypes(sizes.dtype_of(op)).with_tuned_method(
        COLUMN_GRADIENTS, sizes.tokens, op.in_features, op.out_features
    )


def _multiplies_unlike_sent(op, config):
    """Returns whether this call sends FP8 rows, but has a wide GEMM, on a GPU."""
    is_wide = config.choice.sends_fp8 and op.fp8 is None
    return is_wide and config.is_on_cuda and not config.uses_bulk


def _steps(op, is_fused, config: CallConfig, *, is_backward) -> list[Step]:
    """Returns the GEMMs and collectives of one pass of a linear layer, in order."""
    parallel = config.mode.parallel
    if not is_fused:
        text = _unfused_steps(config.mode, is_backward=is_backward)
    elif not is_backward:
        text = f"{mode_of(parallel, True).op} kn"
    elif parallel == "row":
        text = "all_gather_matmul nk, matmul kn"  # one gather of dy
    elif config.uses_bulk:
        text = "bulk_all_gather kn, bulk_reduce_scatter kn"
    else:
        gather = "all_gather kk, " if config.gathers_first else ""
        text = f"matmul_reduce_scatter nk, {gather}wgrad kn"
    size = {"k": op.in_features, "n": op.out_features}
    steps: list[Step] = []
    for step in text.split(", "):
        name, dims = step.split()
        names: tuple[str, ...] = (name,)
        if config.choice.sends_fp8:
            names = _SUMS_AS_FP8.get(name, names)
        if _multiplies_unlike_sent(op, config):
            names = _FP8_ON_GPUS.get(name, names)
        for each in names:
            # For a collective, k is the number of features of the array that it
            # communicates.
            k = size[dims[1 if each == "all_to_all" else 0]]
            steps.append((each, k, size[dims[1]]))
    return steps


def _unfused_steps(mode: ParallelMode, *, is_backward: bool) -> str:
    """Returns the steps of one pass of a linear layer that is not fused, as text.

    In "matmul kn", the contracted size is k and the number of output features is n, for
    a kernel of shape [k, n].
    """
    # A column-parallel layer communicates x and dx, and a row-parallel layer y and dy.
    dims = "kk" if mode.parallel == COLUMN else "nn"
    sums = "reduce_scatter" if mode.sequence_parallel else "all_reduce"
    names = {CommOverlapType.AG: "all_gather", CommOverlapType.RS: sums}
    possible = mode.dgrad[::-1] if is_backward else mode.fprop
    collectives = [f"{names[one.comm_type]} {dims}" for one in possible]
    if is_backward:
        steps = [*collectives, "matmul nk", "matmul kn"]
    elif mode.gathers_x:
        steps = [*collectives, "matmul kn"]
    else:
        steps = ["matmul kn", *collectives]
    return ", ".join(steps)


def _collective(op, name) -> Row:
    forward, backward = _COLLECTIVES[type(op)]
    target = forward if name == "forward" else backward
    if isinstance(op, AllReduce) and op.reduce_in_backward:
        target = forward  # its transpose is a sum, too
    reason = "no GEMM overlaps it" if target else ""
    method = methods.resolve(op.label, op.method, None).value
    note = "" if target else "identity"
    return Row("", target or "none", not target, method, reason, note=note)


def _notes(fuser, passes, reasons):
    for name in _PASSES:
        shown = dict(passes[name])  # one entry per window, by first index
        texts = [
            f"{first} {op.label}"
            if not isinstance(op, FusedOperation)
            else f"{_covered(op, first)} ({', '.join(o.label for o in op.basic_ops)})"
            for first, op in sorted(shown.items())
        ]
        yield f"{name}: {'; '.join(texts)}"
    for name in _PASSES:
        for index, texts in sorted(reasons[name].items()):
            if not isinstance(fuser.basic_ops[index], BasicLinear):
                where = operation_label(fuser.basic_ops, index)
                yield f"not fused {name}: {where}: {'; '.join(texts)}"
