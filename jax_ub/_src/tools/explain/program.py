"""Implements `ub.explain`, which finds overlap in a function's compiled program."""

import ast
import collections
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jax_ub._src import arguments, lowering_log
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.lowering_log import LoweredCall, recording, shape_of
from jax_ub._src.primitives.call import Call
from jax_ub._src.primitives.sizes import op_of
from jax_ub._src.tools.explain import hlo, sizes
from jax_ub._src.tools.explain.table import Row, Table, flops_text
from jax_ub._src.tools.simulate.hardware import HARDWARE, Hardware, find
from jax_ub._src.tools.trace import perfetto
from jax_ub._src.tools.trace.recorder import Recording, TraceError
from jax_ub._src.tools.trace.spans import Trace

_SITE = tuple[Call, tuple[jax.ShapeDtypeStruct, ...]]
_LOOP = "in a loop"
_ASSUMED = "h200"  # for GPUs that the simulator does not know
_Path = str | pathlib.Path
_Trace = Recording | Trace | _Path | Sequence[_Path]


def explain(
    fn: Callable[..., Any],
    *args: Any,
    hardware: str | Hardware | None = None,
    trace: _Trace | None = None,
    **kwargs: Any,
) -> Table:
    """Explains what overlaps in `fn(*args, **kwargs)`, what does not, and why.

    The function is traced and compiled again, even if it has run before, but not
    executed. Print the returned table. Transformer Engine: none.

    Args:
        fn: a function, possibly jitted with `jax.jit` or `nnx.jit`. Pass `jax.grad` of
            a function to include its backward pass.
        *args: positional arguments, or `jax.ShapeDtypeStruct`s with shardings.
        hardware: predicts times for this machine: a name or a `Hardware` of
            `jax_ub._src.tools.simulate`. None selects the kind of the present devices.
        trace: adds measured waiting times. Pass the recording of `ub.trace`, its
            `.trace`, or the files that it wrote.
        **kwargs: keyword arguments of `fn`.

    Returns:
        A table with a row for each call of jax_ub, and for each collective of XLA that
        could be fused with an adjacent dot. Rows show the bytes that a rank sends and
        predicted seconds.

    Raises:
        UnknownNameError: if the hardware is not known or a file is not a trace.
        InputError: if a file cannot be read (an `OSError`).
        TraceError: if `trace` is a recording whose block has not ended.
    """
    arguments.check_function("explain", "fn", fn)
    if hardware is not None:
        hardware = find(hardware)
    program, arrays = _unseen(fn, args, kwargs)
    traced = program.trace(*arrays)
    with recording() as lowered:
        text = traced.lower().compile().as_text() or ""
    found = hlo.collectives(text)
    counts = _count(traced.jaxpr.jaxpr)
    rows = [
        *call_rows(lowered, counts, hardware or machine(), exposed(trace)),
        *pair_rows(found.pairs, hardware or machine()),
        *_other_fallbacks(traced.jaxpr.jaxpr, found.pairs),
    ]
    name = getattr(fn, "__name__", "").strip("<>") or "program"
    return summary(name, rows, [found], hardware)


def _unseen(fn, args, kwargs):
    """Wraps `fn` in a new jitted function of its array arguments; returns both.

    JAX lowers each function once, and `recording` only sees calls that are lowered in
    its block. Other arguments than arrays are closed over, because `fn` may declare
    them as static.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def program(*arrays):
        given = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        filled = [next(given) if traced else leaf for leaf, traced in pairs]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return fn(*args, **kwargs)

    program.__name__ = getattr(fn, "__name__", program.__name__)
    return jax.jit(program), list(itertools.compress(leaves, is_array))


def summary(
    name: str,
    rows: Sequence[Row],
    found: Iterable[hlo.Found],
    hardware: str | Hardware | None,
) -> Table:
    """Returns the table of `explain`, with a title, the rows and notes below them.

    The title has the number of overlapped calls. The notes count XLA's collectives in
    `found` that have no adjacent dot.
    """
    on = sum(row.overlapped for row in rows)
    title = f"{name}: {on} of {len(rows)} overlapped" if rows else f"{name}: no linears"
    others: collections.Counter[str] = collections.Counter()
    for one in found:
        others.update(one.others)
    listed = ", ".join(f"{kind} x {count}" for kind, count in sorted(others.items()))
    table = Table(tuple(rows), title)
    notes = []
    if table.custom_call_flops:
        total = flops_text(table.custom_call_flops)
        notes.append(
            f"custom calls: {total}FLOP a rank, which cost_analysis() counts as 0"
        )
    if listed:
        notes.append(f"XLA's collectives without a dot next to them: {listed}")
    return dataclasses.replace(table, notes=(*notes, *assumed(hardware, rows)))


def call_rows(
    lowered: Sequence[LoweredCall],
    counts: Mapping[_SITE, str],
    hardware: str | Hardware,
    waited: Mapping[tuple[str, str], float],
) -> Iterator[Row]:
    """Yields a table row for each group of equal calls of jax_ub in a lowered program.

    A row has the call's bytes and predicted time on `hardware`. `waited` has measured
    waiting times by label and op.
    """
    alike: dict[tuple[Any, ...], list[LoweredCall]] = {}
    for one in lowered:
        like = (one.call, one.operands, one.method, one.reason)
        alike.setdefault(like, []).append(one)
    for (call, operands, method, reason), sites in alike.items():
        # Predict the requested method, because "auto" may select another method on the
        # predicted machine than on this one.
        asked = "xla" if reason else call.method.value
        found = sizes.prediction(call, operands, asked, hardware)
        local = not call.axis_name or call.num_ranks == 1
        count = counts.get((call, operands), str(len(sites)))
        notes = ["" if count in ("", "1") else f"x {count}"]
        notes.append("nothing to communicate" if local else "")
        notes.append(call.replicated)
        yield Row(
            scope=_scope(sites[0].scope, call.label),
            op=op_of(call),
            overlapped=reason is None,
            method=method.value,
            reason=reason or "",
            moved_bytes=None if local else round(found.moved_bytes),
            predicted_s=found.seconds,
            measured_exposed_s=waited.get((call.label, op_of(call))),
            note=", ".join(filter(None, notes)),
            flops=sizes.flops(call, operands),
            count=int(count) if count.isdigit() and int(count) else len(sites),
        )


def pair_rows(pairs: Sequence[hlo.Pair], hardware: str | Hardware) -> Iterator[Row]:
    """Yields a row for each group of equal pairs of an XLA collective and a dot.

    Such a pair is not overlapped; the row's reason names the function that could
    replace it.
    """
    places = collections.Counter(map(_place, pairs))
    for (pair, fallen, repeated), count in places.items():
        reverse = pair.collective == "all-gather"
        op = f"{pair.collective} + dot" if reverse else f"dot + {pair.collective}"
        yield Row(
            scope=pair.scope,
            op=op,
            overlapped=False,
            method="xla",
            reason=fallen.reason
            if fallen
            else f"XLA's own: could be one ub.{pair.could_be}",
            moved_bytes=pair.moved_bytes,
            predicted_s=sizes.pair_seconds(pair, hardware),
            note=", ".join(filter(None, [f"x {count}" if count > 1 else "", repeated])),
            flops=sizes.pair_flops(pair),
            count=count,
        )


def _place(pair):
    """Returns the pair with its user-visible scope, its fallback and a note."""
    fallen = lowering_log.called_instead(pair.scope)
    scope = _scope(pair.scope, "") if fallen is None else _scope("", fallen.label)
    repeated = lowering_log.replicated_in(pair.scope)
    reason = repeated.reason if repeated else ""
    return dataclasses.replace(pair, scope=scope), fallen, reason


def _other_fallbacks(jaxpr, pairs) -> Iterator[Row]:
    """Yields rows for fallbacks that run as a dot without an adjacent collective."""
    known = {lowering_log.called_instead(pair.scope) for pair in pairs}
    for equation, _ in _equations(jaxpr, 1):
        if equation.primitive.name != "dot_general":
            continue
        fallen = lowering_log.called_instead(str(equation.source_info.name_stack))
        if fallen is not None and fallen not in known:
            known.add(fallen)
            yield Row(_scope("", fallen.label), "dot", False, "xla", fallen.reason)


def machine() -> str:
    """Returns the simulator's name of this process's devices, such as "h100" or "cpu".

    Unknown devices are assumed to be `_ASSUMED`.
    """
    return _known() or _ASSUMED


def assumed(hardware: str | Hardware | None, rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns a note for the table if the devices are unknown to the simulator.

    Their times are then predicted for `_ASSUMED`. Otherwise, the tuple is empty.
    """
    is_predicted = any(row.predicted_s is not None for row in rows)
    if hardware is not None or not is_predicted or _known():
        return ()
    return (
        f"unknown device {shown(jax.devices()[0].device_kind)}: times are predicted "
        f"for {_ASSUMED}. Pass hardware=, a machine's name of `jax_ub simulate`",
    )


@functools.cache
def _known():
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    kind = device.device_kind.lower()
    return next((name for name in HARDWARE if name in kind), None)


def exposed(trace: Any) -> dict[tuple[str, str], float]:
    """Returns the measured seconds that a rank waits per call, by label and op.

    `trace` is None, a recording, a trace, or paths of trace files.
    """
    if trace is None:
        return {}
    if isinstance(trace, Recording):
        if trace.trace is None:
            raise TraceError(
                "explain: trace is a recording that has not ended. Call explain after "
                "the block of ub.trace."
            )
        trace = trace.trace
    if isinstance(trace, Trace):
        return trace.exposed_by_op_s()
    paths = trace if isinstance(trace, list | tuple) else [trace]
    if not all(isinstance(path, str | pathlib.Path) for path in paths):
        raise ShapeContractError(
            f"explain: trace = {shown(trace)} is no trace. Pass what ub.trace "
            "recorded, the path of its file, or a list of paths."
        )
    return perfetto.read([pathlib.Path(path) for path in paths]).exposed_by_op_s()


def _scope(stack, label):
    """Returns the user's name of a call, or else the enclosing functions' names."""
    named = re.search(r"\(ub_name (.*)\)$", label)
    if named:
        return _text(named[1])
    ours = ("jit(", "shard_map", "shmap_body", "jvp(", "transpose(", "custom_vjp")
    parts = [p for p in stack.split("/") if p and not p.startswith(ours)]
    parts = [p for p in parts if not lowering_log.is_mark(p)]
    return "/".join(parts[:-1] if not label else parts) or label or stack


def _text(shown):
    """Evaluates the quoted user's name in a call's label.

    A label that was truncated cannot be evaluated and is returned unchanged.
    """
    try:
        return str(ast.literal_eval(shown))
    except (SyntaxError, ValueError):
        return shown


def _count(jaxpr: core.Jaxpr) -> dict[_SITE, str]:
    """Returns how often each call of a jaxpr runs; a scan multiplies by its length.

    The count of a call in a while loop is unknown and is `_LOOP`.
    """
    counts: collections.Counter[_SITE] = collections.Counter()
    loops: set[_SITE] = set()
    for site, times in _sites(jaxpr):
        counts[site] += times or 0
        if times is None:
            loops.add(site)
    return {
        site: _LOOP if site in loops else str(count) for site, count in counts.items()
    }


def _sites(jaxpr):
    for equation, times in _equations(jaxpr, 1):
        call = equation.params.get("call")
        if isinstance(call, Call):
            operands = tuple(shape_of(variable.aval) for variable in equation.invars)
            yield (call, operands), times


def _equations(jaxpr, times):
    """Yields all equations of a jaxpr with their number of executions.

    It descends into nested jaxprs. The number is None inside a while loop.
    """
    for equation in jaxpr.eqns:
        yield equation, times
        inner = times
        if equation.primitive.name == "scan" and times is not None:
            inner = times * equation.params["length"]
        elif equation.primitive.name == "while":
            inner = None
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, core.ClosedJaxpr):
                    yield from _equations(one.jaxpr, inner)
                elif isinstance(one, core.Jaxpr):
                    yield from _equations(one, inner)
