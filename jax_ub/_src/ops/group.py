"""Differentiates a group of consecutive operations as one function."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ub._src.errors import UbError
from jax_ub._src.ops.fused_operation import FusedOperation, expand, windows
from jax_ub._src.ops.operation import BasicOperation, RequestedGradients
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.rules.operands import pcast_operands
from jax_ub._src.rules.vjp import (
    check_sources,
    from_saved,
    is_zero,
    mapped_together,
    placeholder,
    residual_or_placeholder,
    save,
)
from jax_ub._src.scaled_array import (
    cotangent_of_scaled,
    dequantized,
    is_scaled,
    map_scaled,
    source_of,
)

Needs = tuple[RequestedGradients, ...]
Saves = tuple[frozenset[str], ...]
# Advice for the error that an axis is not in scope in the backward pass. The axis was
# in scope in the forward pass, so it is the `axis_name` of a `jax.vmap`.
_OUTSIDE_VMAP = (
    " JAX differentiates a jax.vmap outside of its axis. Differentiate inside the "
    "jax.vmap instead: jax.vmap(jax.grad(f), axis_name=...)."
)


@dataclasses.dataclass(frozen=True)
class ExtraTensorEdges:
    """The connections from extra outputs (arrays besides y) to later extra inputs.

    An *edge* is the number of an extra tensor: an extra input from outside of a list of
    operations, or an extra output of an operation.

    Attributes:
        inputs: for each operation, the edges that are its extra inputs.
        outputs: for each operation, the edges that are its extra outputs.
        to_outside: the extra outputs that are read outside of the list, in order.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    to_outside: tuple[int, ...]

    @property
    def from_outside(self) -> tuple[int, ...]:
        """Returns the edges of the extra inputs that no operation here produces."""
        produced = set(itertools.chain(*self.outputs))
        read = dict.fromkeys(itertools.chain(*self.inputs))
        return tuple(edge for edge in read if edge not in produced)

    def within(self, start: int, end: int) -> "ExtraTensorEdges":
        """Returns the edges of only the operations with indices [start, end)."""
        outputs = self.outputs[start:end]
        wanted = {*self.to_outside, *itertools.chain(*self.inputs[end:])}
        read = tuple(edge for edge in itertools.chain(*outputs) if edge in wanted)
        return ExtraTensorEdges(self.inputs[start:end], outputs, read)


@dataclasses.dataclass(frozen=True)
class OperationGroup:
    """Consecutive basic operations that are differentiated by one `jax.custom_vjp`.

    A group ends wherever a fused operation of the forward and one of the backward end
    together, unless a quantized tensor passes there. With groups this short, JAX itself
    determines which of them need gradients, and sums the cotangents of an extra output
    that several groups read.

    Attributes:
        forward_ops: the operations that compute the results.
        backward_ops: the operations that compute the gradients. They consist of the
            same basic operations.
        first: index of the group's first basic operation in the fuser's list.
        edges: the extra tensors of the basic operations.
    """

    forward_ops: tuple[FusedOperation, ...]
    backward_ops: tuple[FusedOperation, ...]
    first: int
    edges: ExtraTensorEdges

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return expand(self.forward_ops)

    def requested_gradients(self, avals) -> Needs:
        """Returns which gradients the backward of each operation must compute.

        `avals` has the cotangent types of the operands. An operation computes dx if x
        has a cotangent or an earlier operation needs a gradient.
        """
        is_reached = avals["x"] is not None
        edges = {edge: aval is not None for edge, aval in avals["edges"].items()}
        needs = []
        for params, inputs, outputs in zip(
            avals["params"], self.edges.inputs, self.edges.outputs, strict=True
        ):
            names = frozenset(
                name for name, aval in params.items() if source_of(aval) is not None
            )
            extras = tuple(edges[edge] for edge in inputs)
            needs.append(RequestedGradients(is_reached, names, extras))
            is_reached = bool(needs[-1])
            edges.update(dict.fromkeys(outputs, is_reached))
        return tuple(needs)

    def saved_names(self, needs: Needs) -> Saves:
        """Returns the names of the residuals that the backward of each op reads."""
        return tuple(
            names
            for window, op in windows(self.backward_ops)
            for names in op.saved(needs[window])
        )

    def kept_residuals(self, residuals, saves: Saves) -> tuple[dict[str, Any], ...]:
        """Returns the residuals, with empty arrays for those that no gradient needs.

        The structure of the tree does not depend on the requested gradients.
        """
        everything = tuple(
            RequestedGradients(
                True, frozenset(op.specs()), (True,) * op.num_extra_inputs
            )
            for op in self.basic_ops
        )

        def keep(op, values, wanted, name):
            if name not in values:
                # No forward pass of this group computes the residual. It belongs to an
                # operation inside a fused operation, or it is the FP8 state of a kernel
                # that the caller has quantized. A placeholder for a computed residual
                # has the batch axes of its value under jax.vmap
                # (`residual_or_placeholder`), but here there is no value.
                return placeholder()
            value = values[name]
            # A quantized x already has this checkpoint name. With a second name, a
            # checkpoint policy would save it twice.
            if name != "x" or not is_scaled(value):
                value = save(value, name, op.comm_name)
            return residual_or_placeholder(name in wanted, value)

        all_names = self.saved_names(everything)
        rows = zip(self.basic_ops, residuals, saves, all_names, strict=True)
        return tuple(
            {name: keep(op, values, wanted, name) for name in sorted(names)}
            for op, values, wanted, names in rows
        )

    def intermediate_cotangent_avals(self, operands, needs: Needs):
        """Returns the cotangent types of the arrays between the group's operations.

        These are the activation that each operation reads, in order, and the extra
        outputs by edge. A fused operation does not compute the arrays inside it, so
        their types come from an abstract evaluation of the unfused operations.
        """
        if len(self.basic_ops) == 1:
            return (), {}
        unfused = tuple(FusedOperation((op,)) for op in self.basic_ops)
        own = tuple(itertools.chain(*self.edges.outputs))
        all_edges = dataclasses.replace(self.edges, to_outside=own)
        group = dataclasses.replace(self, forward_ops=unfused, edges=all_edges)
        nothing: Saves = (frozenset(),) * len(unfused)
        _, edges, (_, xs) = jax.eval_shape(
            lambda operands: _run_operations(None, group, operands, nothing), operands
        )
        # The cotangent types are saved as residuals. A type that no gradient needs is
        # replaced by an empty array, so that the tree structure of the residuals does
        # not depend on which gradients are requested.
        x_avals = tuple(
            cotangent_aval(x) if need.x else placeholder()
            for need, x in zip(needs, xs, strict=True)
        )
        edge_avals = {
            edge: cotangent_aval(edges[edge]) if need else placeholder()
            for need, outputs in zip(needs, self.edges.outputs, strict=True)
            for edge in outputs
        }
        return x_avals, edge_avals

    @contextlib.contextmanager
    def naming_errors(
        self, window: slice, op: FusedOperation, if_not_manual: str = ""
    ) -> Iterator[None]:
        """Adds the operations' index and names to errors raised in the context.

        `if_not_manual` is appended to an error about an axis that is not in scope.
        """
        try:
            yield
        except UbError as error:
            labels = ", ".join(basic.label for basic in op.basic_ops)
            text = f"operation {self.first + window.start} ({labels}): {error}"
            if mesh.NOT_MANUAL in text:
                text += if_not_manual
            raise type(error)(text) from error


def _run_operations(configuration, group: OperationGroup, operands, saves=None):
    """Runs the forward pass of a group: its operations, one after the other.

    `operands` has "x"; "params", one dict for each operation; and "edges", the extra
    inputs from outside by edge. `configuration` is part of jit's cache key: it changes
    with the settings that operations look up, such as the methods of named overlaps.

    Returns:
        y; the extra outputs that are read outside of the group, by edge; and, unless
        `saves` is None, the residuals of each basic operation and the activation that
        each of `group.forward_ops` reads.
    """
    x, edges = operands["x"], dict(operands["edges"])
    xs, residuals = [], list[Any]()
    for window, op in windows(group.forward_ops):
        xs.append(source_of(x))
        x = x if op.basic_ops[0].takes_quantized else dequantized(x)
        with group.naming_errors(window, op):
            x, outputs, saved = op.forward(
                operands["params"][window],
                x,
                _arrays_of(edges, group.edges.inputs[window]),
                (frozenset(),) * len(op.basic_ops) if saves is None else saves[window],
            )
        edges.update(_by_edge(group.edges.outputs[window], outputs))
        residuals.extend(saved)
    y, results = dequantized(x), {edge: edges[edge] for edge in group.edges.to_outside}
    if results:
        y, results = mapped_together((y, results), operands)
    return y, results, None if saves is None else (residuals, xs)


def _group_fwd(configuration, group, operands, saves):
    for op, params in zip(group.basic_ops, operands["params"], strict=True):
        if "main_grad" not in params:
            check_sources(op.label, **params)
    values = jax.tree.map(lambda operand: operand.value, operands)
    # The cotangent types are saved as residuals. The tree structure of the residuals
    # must not depend on which gradients are requested (see `residual_or_placeholder`),
    # so an operand without a gradient has a placeholder instead of None.
    avals = jax.tree.map(
        lambda operand: (
            cotangent_aval(operand.value) if operand.perturbed else placeholder()
        ),
        operands,
    )
    avals = map_scaled(lambda scaled: cotangent_of_scaled(scaled.source), avals)
    needs = group.requested_gradients(from_saved(avals))
    saves = group.saved_names(needs)
    y, results, (residuals, _) = _run_operations(configuration, group, values, saves)
    kept = group.kept_residuals(residuals, saves)
    intermediate_avals = group.intermediate_cotangent_avals(values, needs)
    return (y, results, None), (avals, kept, intermediate_avals)


def _group_bwd(configuration, group, _, saved, cotangents):
    """Runs the backward pass of a group: its operations, from the last to the first."""
    avals, residuals, (x_avals, edge_avals) = from_saved(saved)
    dy, d_edges, _ = jax.tree.map(lambda ct: None if is_zero(ct) else ct, cotangents)
    edge_avals = {**avals["edges"], **edge_avals}
    needs = group.requested_gradients(avals)
    d_params: list = [None] * len(needs)
    for window, op in reversed(windows(group.backward_ops)):
        own = tuple(
            {name: value for name, value in values.items() if jax.tree.leaves(value)}
            for values in residuals[window]
        )
        d_outputs = _arrays_of(d_edges, group.edges.outputs[window])
        has_gradients = any(needs[window]) and (
            dy is not None or any(d is not None for row in d_outputs for d in row)
        )
        # If no gradient is needed, or all gradients of the results are zero, the base
        # class's `backward` runs instead of the operation's. It computes nothing, and
        # returns None for each gradient and the unchanged value of an accumulator such
        # as "main_grad".
        backward = (type(op) if has_gradients else FusedOperation).backward
        dy = dy if op.basic_ops[-1].takes_quantized_grad else dequantized(dy)
        with group.naming_errors(window, op, _OUTSIDE_VMAP):
            dy, d_params[window], d_inputs = backward(
                op, own, dy, d_outputs, needs[window]
            )
        if window.start:
            dy = to_cotangent_aval(x_avals[window.start], dy)
        for edge, d in _by_edge(group.edges.inputs[window], d_inputs):
            d = to_cotangent_aval(edge_avals[edge], d)
            if d is not None:
                before = d_edges.get(edge)
                d_edges[edge] = d if before is None else before + d
    gradients = {
        "x": dequantized(dy),
        "params": tuple(
            {name: _cotangent(aval, own.get(name)) for name, aval in of_op.items()}
            for of_op, own in zip(avals["params"], d_params, strict=True)
        ),
        "edges": {edge: d_edges.get(edge) for edge in avals["edges"]},
    }
    return (jax.tree.map(to_cotangent_aval, avals, gradients, is_leaf=_is_none),)


_rule = jax.custom_vjp(_run_operations, nondiff_argnums=(0, 1, 3))
_rule.defvjp(_group_fwd, _group_bwd, symbolic_zeros=True)
# JAX cannot evaluate a custom_vjp with symbolic zeros op by op in an eager shard_map.
# Therefore the rule is jitted, and must be called under `jax.disable_jit(False)`.
# Inside a traced program the jit is inlined.
run_group = jax.jit(_rule, static_argnums=(0, 1), inline=True)


def _is_none(leaf):
    return leaf is None


def _cotangent(aval, gradient):
    """Returns a parameter's cotangent, as a `ScaledArray` if the parameter is FP8."""
    return cotangent_of_scaled(gradient) if is_scaled(aval) else gradient


def _arrays_of(arrays, rows):
    return tuple(tuple(arrays.get(edge) for edge in row) for row in rows)


def _by_edge(rows, arrays):
    return zip(itertools.chain(*rows), itertools.chain(*arrays), strict=True)


def cotangent_aval(value) -> jax.Array:
    """Returns an empty array with the dtype and mesh axes of a cotangent of `value`.

    It stands for the type of the cotangent. As an array, it can be a residual. If
    `value`, an array or `jax.ShapeDtypeStruct`, is sharded over explicit mesh axes, the
    array has its shape after a dimension of size 0, and is sharded in the same way.
    """
    sharding = jax.typeof(value).sharding
    if any(sharding.spec):
        spec = PartitionSpec(None, *sharding.spec)
        empty = jnp.zeros((0, *value.shape), value.dtype)
        empty = jax.sharding.reshard(empty, sharding.update(spec=spec))
    else:
        empty = jnp.zeros((0,), value.dtype)
    return vma.pcast_varying(empty, vma.axes_of(value))


def to_cotangent_aval(aval: jax.Array | None, gradient: Any) -> Any:
    """Casts a gradient to the dtype and the varying mesh axes of its operand.

    `aval` is the operand's `cotangent_aval`. The result is None if either is None.
    If the gradient varies over more mesh axes than the operand, the operand was cast to
    vary over them. The transpose of the cast is a sum, which is computed here. A
    quantized gradient stays quantized if nothing is summed.
    """
    if aval is None or gradient is None:
        return None
    axes = vma.axes_of(aval)
    if is_scaled(gradient):
        if vma.axes_of(*jax.tree.leaves(gradient)) <= axes:
            return pcast_operands(gradient, axes)
        gradient = gradient.dequantize()
    extra = tuple(sorted(vma.axes_of(gradient) - axes))
    if extra:
        gradient = vma.sum_over(gradient, extra)
    own, wanted = jax.typeof(gradient).sharding, jax.typeof(aval).sharding
    spec = PartitionSpec(*(wanted.spec[1:] or (None,) * gradient.ndim))
    if own.spec != spec:  # then one of them has a mesh
        sharding = wanted if any(spec) else own
        gradient = jax.sharding.reshard(gradient, sharding.update(spec=spec))
    return vma.pcast_varying(gradient.astype(aval.dtype), axes)
