"""Implements `ub.explain`, which finds overlap in a function's compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

from jax_ub._src import arguments, dtypes, lowering_log
from jax_ub._src.checks import axis_tuple
from jax_ub._src.lowering_log import Fallback, LoweredCall, recording, shape_of
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.output import format_count
from jax_ub._src.prediction import estimate as simulate
from jax_ub._src.prediction.hardware import RATE_OF_ITEMSIZE, Hardware
from jax_ub._src.primitives.call import Call
from jax_ub._src.tools.explain import hlo, report
from jax_ub._src.tools.explain.report import HardwareLike, Row, Table, TraceLike, Waits
from jax_ub._src.tools.trace.traces import ub_name_in

# An equation of a jaxpr, the number of its executions, and its JAX name stack.
_Equation = tuple[core.JaxprEqn, float, str]
# Matches a name scope that JAX has transformed, such as "jvp(mlp)" for "mlp".
_TRANSFORMED = re.compile(r"(?:jvp|transpose|vmap)\((.*)\)")
# Prefixes of the name scopes that JAX adds to the user's. The table omits them.
_OF_JAX = ("jit(", "shard_map", "shmap_body", "custom_vjp", "rematted_computation")
# Maps JAX primitives to their names in the table. A call of jax_ub that falls back to
# plain JAX is found by these primitives.
_FALLEN = {"dot_general": "dot", "all_to_all": "all-to-all"}
_SHORT_NAMES = {row.dtype: row.short_name for row in dtypes.TABLE}
_RESHARDED = (
    "XLA's own: the call expects another sharding. Are the kinds "
    '"column" and "row" swapped?'
)


def explain(
    fn: Callable[..., Any],
    *args: Any,
    hardware: HardwareLike = None,
    trace: TraceLike = None,
    **kwargs: Any,
) -> Table:
    """Lists the collectives of `fn(*args, **kwargs)`, and whether a GEMM overlaps each.

    If a collective does not overlap, its row has the reason.

    The function is traced and compiled again, even if it has run before, but not
    executed. Print the returned table. Transformer Engine: none.

    Args:
        fn: a function, possibly jitted with `jax.jit` or `nnx.jit`. Pass `jax.grad` of
            a function to include its backward pass.
        *args: positional arguments, or `jax.ShapeDtypeStruct`s with shardings.
        hardware: predicts times for this machine: a name, such as "h100", or a dict of
            rates, such as `{"name": "h100", "wire_bytes_per_s": 200e9}`. None selects
            the kind of the present devices.
        trace: adds measured waiting times. Pass the recording of `ub.trace`, its
            `.trace`, or the files that it wrote.
        **kwargs: keyword arguments of `fn`.

    Returns:
        A table with a row for each call of jax_ub, and for each collective of XLA that
        could be fused with an adjacent dot. Rows show the bytes that a rank sends and
        predicted seconds.

    Raises:
        ShapeContractError: if `fn` is not a function, or `trace` has another type.
        UnknownNameError: if the hardware is not known or a file is not a trace.
        ConfigurationError: if a rate of the hardware is missing or out of range.
        InputError: if a file cannot be read (an `OSError`).
        TraceError: if `trace` is a recording whose block has not ended.
    """
    arguments.check_function("explain", "fn", fn)
    report.find_hardware(hardware)  # fails before the program is compiled
    program, arrays = _as_new_function(fn, args, kwargs)
    traced = program.trace(*arrays)
    with recording() as lowered:
        text = compiled_text(traced)
    run = list(equations(traced.jaxpr.jaxpr))
    found = list(hlo.collectives(text, _mesh_of(run, arrays)))
    name = getattr(fn, "__name__", "").strip("<>") or "program"
    waits = report.read_waits(trace)
    return table_of(name, lowered, found, hardware, waits, arrays, run)


def compiled_text(traced: jax.stages.Traced) -> str:
    """Compiles a program and returns its optimized HLO text, with JAX's name stacks.

    By default, JAX's compilation cache ignores these names, and may return an equal
    program that was compiled with other names.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        return traced.lower().compile().as_text() or ""
    finally:
        jax.config.update(option, before)


def _as_new_function(fn, args, kwargs):
    """Returns a new jitted function that calls `fn`, and the arrays to pass to it.

    The function takes the arrays in `args` and `kwargs` one by one. JAX lowers a
    function once, and `recording` sees only calls that are lowered in its block.
    Arguments that are not arrays are closed over, because `fn` may declare them as
    static.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {index: leaf for index, leaf in enumerate(leaves) if _is_array(leaf)}

    def program(*traced):
        filled = dict(enumerate(leaves)) | dict(zip(arrays, traced, strict=True))
        args, kwargs = jax.tree.unflatten(tree, filled.values())
        result = fn(*args, **kwargs)
        # nnx functions update their arguments in place. The new values are returned,
        # because JAX removes a computation whose result is not returned.
        updated = [x for x in jax.tree.leaves((args, kwargs)) if _is_array(x)]
        return result, updated

    program.__name__ = getattr(fn, "__name__", program.__name__)
    return jax.jit(program), list(arrays.values())


def _is_array(leaf):
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _mesh_of(run: Sequence[_Equation], arrays: Sequence[Any]) -> Mapping[str, int]:
    """Returns {mesh axis: size} of a program, or {} if its mesh is unknown."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh.shape
    for equation, *_ in run:
        if equation.primitive.name == "shard_map":
            return equation.params["mesh"].shape
    return {}


def _tensor_axes(lowered, arrays) -> Collection[str] | None:
    """Returns the mesh axes of tensor parallelism, or None if they are unknown.

    These are the axes of jax_ub's calls. A program without calls shards its batch,
    which is the first dimension, over the other axes.
    """
    if named := {axis for one in lowered for axis in one.call.axis_name}:
        return named
    shardings = [getattr(array, "sharding", None) for array in arrays]
    specs = [one.spec for one in shardings if isinstance(one, NamedSharding)]
    if not any(axis for spec in specs for axis in spec):
        return None
    return {axis for spec in specs for part in spec[1:] for axis in axis_tuple(part)}


def table_of(
    name: str,
    lowered: Sequence[LoweredCall],
    found: Sequence[hlo.Collective],
    hardware: HardwareLike,
    waits: Waits,
    arrays: Sequence[Any] = (),
    run: Sequence[_Equation] = (),
) -> Table:
    """Builds the table that `explain` prints, with rows for calls and collectives.

    `found` has all collectives of XLA, `arrays` are the program's arguments, and `run`
    has its equations. Without the equations, a call counts as often as it is lowered,
    and a call that became plain JAX during tracing is listed only if XLA communicates
    next to its dot.
    """
    machine, axes = report.find_hardware(hardware), _tensor_axes(lowered, arrays)
    rows = [
        *call_rows(lowered, machine, waits, run),
        *_xla_rows(found, machine, lowered, axes),
        *_other_fallbacks(run, found),
    ]
    linears = [row for row in rows if not row.is_collective]
    on = sum(row.overlapped for row in linears)
    title = f"{name}: {on} of {len(linears)} overlapped"
    notes = []
    if flops := Table(tuple(rows)).custom_call_flops:
        total = format_count(flops, "FLOP")
        notes.append(f"custom calls: {total} a rank, which cost_analysis() counts as 0")
    notes += report.collective_notes(found, lowered, axes)
    return report.table_on(
        hardware, rows, title if linears else f"{name}: no linears", notes
    )


def call_rows(
    lowered: Sequence[LoweredCall],
    machine: Hardware,
    waits: Waits,
    run: Sequence[_Equation],
) -> Iterator[Row]:
    """Yields a table row for each distinct call of jax_ub in a program.

    A call without an equation in `run` counts as often as it is lowered.
    """
    executions = _executions(run)
    groups = collections.defaultdict(list)
    for one in lowered:
        key = (one.call, one.operands, one.method, one.reason, one.tiles)
        groups[key].append(one)
    for (call, operands, method, reason, tiles), equal in groups.items():
        op, M, K, N = call.global_sizes(operands)
        num_ranks = call.num_ranks if call.axis_name else 1
        dtypes = _multiplied(call, operands)
        # The prediction is for the requested method. With "auto", the predicted machine
        # may select a different method than this machine.
        prediction = simulate.estimate(
            op,
            MethodChoice(Method.XLA) if reason else call.choice,
            M=max(M, 1),
            K=max(K, 1),
            N=max(N, 1),
            P=num_ranks,
            dtype=max(dtypes, key=lambda dtype: dtype.itemsize),
            machine=machine,
            gathered_dtype=call.gathered_dtype(*operands),
        )
        lowerings = [(1, one.scope) for one in equal]
        executed = executions.get((call, operands), lowerings)
        scopes = dict.fromkeys(_scope(stack, call.label) for _, stack in executed)
        count = sum(times for times, _ in executed)
        notes = ["" if count == 1 else f"x {count}"]
        if count == math.inf:
            notes, count = ["x in a loop"], len(equal)
        notes.append("nothing to communicate" if num_ranks == 1 else "")
        notes.append(call.execution.replicated)
        if tiles is not None:
            notes.append(f"JAX's kernel, with {tiles}, the fastest by a tuned table")
        elif equal[0].why_not_pallas:
            notes.append(f"not pallas: {equal[0].why_not_pallas}")
        is_sequential = method is Method.EXTERNAL and num_ranks > 1 and tiles is None
        why_not = reason or (_why_sequential(call) if is_sequential else "")
        yield Row(
            scope=", ".join(scopes),
            op=call.op,
            overlapped=not why_not,
            method=method.value if tiles is None else "pallas",
            reason=why_not,
            moved_bytes=None if num_ranks == 1 else round(prediction.moved_bytes),
            # The cost model does not include JAX's Pallas kernel, so no time is
            # predicted for it.
            predicted_s=prediction.seconds if tiles is None else None,
            measured_exposed_s=waits.get((call.label, call.op)),
            note=", ".join(filter(None, notes)),
            flops=0 if call.communicates_only else 2 * M * K * N // num_ranks,
            count=int(count) or len(equal),
            dtype=" x ".join(_SHORT_NAMES.get(each, each.name) for each in dtypes),
        )


def _why_sequential(call):
    """Returns why a call does not overlap: what has selected the method "external"."""
    source = "given"
    if call.choice.is_from_environment:
        source = "from JAX_UB_METHOD"
    elif not call.choice.is_explicit:
        by_name, by_size = "the default of its name", "the fastest by a tuned table"
        source = by_name if call.execution.is_named else by_size
    return f'method = "external" ({source}) communicates before or after the GEMM'


def _multiplied(call, operands):
    """Returns the distinct dtypes of the operands of a call's GEMM.

    For a call without a GEMM, it is the dtype of the array that is sent.
    """
    num_multiplied = call.num_scales or (1 if call.communicates_only else 2)
    return list(dict.fromkeys(each.dtype for each in operands[:num_multiplied]))


def _xla_rows(found, machine, lowered, axes) -> Iterator[Row]:
    """Yields a row for each collective of XLA that jax_ub could overlap or avoid.

    Collectives to which a call in `lowered` fell back are left out, because `call_rows`
    has the call. Collectives of data parallelism, along other mesh axes than `axes`,
    are left out, unless `axes` is None.
    """
    listed = {Fallback(one.call.label, one.reason) for one in lowered if one.reason}
    pairs = (one for one in found if one.could_be and not report.note_of(one, axes))
    groups = collections.Counter(map(_split_scope, pairs))
    for (pair, fallback, repeated), count in groups.items():
        if fallback in listed:
            continue
        is_gather = pair.kind == "all-gather"
        could_be = f"XLA's own: could be one ub.{pair.could_be}"
        combined = ""
        if pair.num_combined > 1:
            combined = f"one of {pair.num_combined} arrays of a collective"
        yield dataclasses.replace(
            _xla_row(pair, count, [repeated, combined]),
            op=f"{pair.kind} + dot" if is_gather else f"dot + {pair.kind}",
            reason=fallback.reason if fallback else could_be,
            **_cost(pair, machine),
        )
    reshards = (one for one in found if one.is_reshard_over(axes))
    for one, count in collections.Counter(reshards).items():
        if one.kind != "all-gather":
            yield _xla_row(one, count)


def _xla_row(one, count, notes=()):
    counted = f"x {count}" if count > 1 else ""
    return Row(
        one.scope,
        one.kind,
        overlapped=False,
        method="xla",
        reason=_RESHARDED,
        moved_bytes=one.moved_bytes,
        note=", ".join(filter(None, [counted, *notes])),
        count=count,
        dtype=one.dtype,
        source=one.source,
        axis=", ".join(one.axes),
    )


def _cost(pair, machine) -> dict[str, Any]:
    """Returns the FLOPs and the predicted seconds of a collective and its dot."""
    if pair.sizes is None:
        return {}
    M, K, N = pair.sizes
    flops = 2 * M * K * N // max(pair.num_ranks, 1)
    if pair.itemsize not in RATE_OF_ITEMSIZE:
        return {"flops": flops}
    # `serial_s` is the time if partial sums are sent in the dtype of the result, as XLA
    # does in this program. The method "xla" of jax_ub would send them in f32.
    prediction = simulate.estimate(
        *(pair.could_be, MethodChoice(Method.XLA), M, K, N, pair.num_ranks),
        dtype=np.dtype(("V", pair.itemsize)),  # only its size matters
        machine=machine,
    )
    return {"flops": flops, "predicted_s": prediction.serial_s}


def _split_scope(pair):
    """Splits a JAX name stack into the user's scope and the scopes that jax_ub added.

    Returns:
        The pair with the user's scope; the `Fallback` if plain JAX replaced a call of
        jax_ub, else None; and why several ranks repeat the operations, or "".
    """
    fallback = lowering_log.fallback_in(pair.scope)
    scope = _scope("", fallback.label) if fallback else _scope(pair.scope, "")
    repeated = lowering_log.replicated_in(pair.scope)
    reason = repeated.reason if repeated else ""
    return dataclasses.replace(pair, scope=scope), fallback, reason


def _other_fallbacks(run, found) -> Iterator[Row]:
    """Yields a table row for each call that runs as plain JAX and has no row yet.

    These are calls whose dot has no adjacent collective, for example on one rank, and
    partial sums that are sent as FP8. Calls whose dot is next to a collective in
    `found` already have rows.
    """
    known = {lowering_log.fallback_in(one.scope) for one in found if one.could_be}
    for equation, *_ in run:
        op = _FALLEN.get(equation.primitive.name)
        if op is None:
            continue
        fallen = lowering_log.fallback_in(str(equation.source_info.name_stack))
        if fallen is not None and fallen not in known:
            known.add(fallen)
            yield Row(_scope("", fallen.label), op, False, "xla", fallen.reason)


def _scope(stack, label):
    """Returns the `ub_name` in `label`, or else the user's `jax.named_scope`s.

    `stack` is a name stack, such as "jit(step)/mlp/dot_general". Without a label, its
    last part is the primitive. Scopes that JAX or jax_ub adds are left out. If there
    are no others, returns `label`, or `stack` without a label.
    """
    if named := ub_name_in(label):
        return named
    parts = [_without_transformations(part) for part in stack.split("/")]
    parts = [p for p in parts if p and not p.startswith(_OF_JAX)]
    parts = [p for p in parts if not lowering_log.is_mark(p)]
    return "/".join(parts[:-1] if not label else parts) or label or stack


def _without_transformations(scope):
    while match := _TRANSFORMED.fullmatch(scope):
        scope = match[1]
    return scope


def _executions(run: Sequence[_Equation]):
    """Returns {(call of jax_ub, its operands): [(number of executions, name stack)]}.

    The list has an entry for each equation that binds the call to such operands.
    """
    found = collections.defaultdict(list)
    for equation, times, stack in run:
        call = equation.params.get("call")
        if isinstance(call, Call):
            variables, _ = call.split(equation.invars)
            operands = tuple(shape_of(variable.aval) for variable in variables)
            found[call, operands].append((times, stack))
    return found


def equations(
    jaxpr: core.Jaxpr, times: float = 1, outer_stack: str = ""
) -> Iterator[_Equation]:
    """Yields (equation, count, name stack) for a jaxpr and its nested jaxprs.

    The count is the number of executions, inf inside a while loop. JAX's name stack of
    an equation begins in its own jaxpr, so the stacks of the enclosing equations are
    put before it.
    """
    for equation in jaxpr.eqns:
        stack = f"{outer_stack}/{equation.source_info.name_stack}"
        yield equation, times, stack
        inner = times
        if equation.primitive.name == "scan":
            length = equation.params["length"]
            inner = length and times * length  # not 0 * inf
        elif equation.primitive.name == "while":
            inner = math.inf
        for leaf in jax.tree.leaves(equation.params):
            nested = getattr(leaf, "jaxpr", leaf)  # of a ClosedJaxpr
            if isinstance(nested, core.Jaxpr):
                yield from equations(nested, inner, stack)
