"""Differentiates a run of consecutive basic operations as one function."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import jax

from jax_ub._src.errors import UbError
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    RequestedGradients,
    Residuals,
    expand,
    windows,
)
from jax_ub._src.rules.fused_group import aval_or_placeholder, to_cotangent_aval
from jax_ub._src.rules.vjp import placeholder, residual_or_placeholder, save


@dataclasses.dataclass(frozen=True)
class OperationGroup:
    """Consecutive basic operations that are differentiated as one function.

    The forward and the backward may be fused differently: `forward_ops` and
    `backward_ops` cover the same basic operations. An *edge* is the number of an extra
    tensor (an array that an operation reads or returns besides the activation).

    A group ends wherever a fused operation of the forward and one of the backward end
    together. With groups this short, JAX itself determines which of them need
    gradients, and sums the cotangents of an extra output that several groups read.

    The operands are a dict: "x"; "params", a tuple with one dict for each operation;
    and "wires", the extra inputs from outside the group by edge number. The results are
    y and a dict of the extra outputs in `results` by edge number.

    Attributes:
        forward_ops: the operations that compute the results.
        backward_ops: the operations that compute the gradients.
        first: index of the group's first basic operation in the fuser's list.
        inputs: for each operation, the edges that are its extra inputs.
        outputs: for each operation, the edges that are its extra outputs.
        results: the edges that later groups or the caller read.
    """

    forward_ops: tuple[FusedOperation, ...]
    backward_ops: tuple[FusedOperation, ...]
    first: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic operations of the group, in forward order."""
        return expand(self.forward_ops)

    @property
    def taken(self) -> set[int]:
        """The numbers of the extra tensors that the group reads from outside."""
        made = set(itertools.chain(*self.outputs))
        return set(itertools.chain(*self.inputs)) - made

    def forward(self, operands, cotangent_avals):
        """Computes the group's outputs, and the residuals that its backward reads.

        Runs the operations of `forward_ops` in order. `cotangent_avals` is None for
        operands without a gradient.
        """
        needs = self._needs(cotangent_avals)
        saves = self._saves(needs)
        xs, edges, residuals = self._run(self.forward_ops, operands, saves)
        kept = {
            "ops": self._kept(residuals, saves),
            "likes": self._likes(operands, needs),
        }
        return (xs[-1], {edge: edges[edge] for edge in self.results}), kept

    def _run(self, ops, operands, saves):
        """Runs the forward of `ops` in order; passes extra outputs to their readers.

        Returns:
            The input x of the first operation and the output of each, all edges, and
            the residuals of each basic operation.
        """
        x, edges = operands["x"], dict(operands["wires"])
        xs = [x]
        residuals: list[Residuals] = []
        for window, op in windows(ops):
            params = operands["params"][window]
            extras = _rows(edges, self.inputs[window])
            with self._named(window, op):
                x, outputs, saved = op.forward(params, x, extras, saves[window])
            xs.append(x)
            edges.update(_pairs(self.outputs[window], outputs))
            residuals.extend(saved)
        return xs, edges, residuals

    def _needs(self, cotangent_avals) -> tuple[RequestedGradients, ...]:
        """Returns which gradients the backward of each basic operation must compute.

        An operation computes dx if x has a cotangent or an earlier operation needs a
        gradient.
        """
        reached = cotangent_avals["x"] is not None
        edges = {
            edge: like is not None for edge, like in cotangent_avals["wires"].items()
        }
        needs = []
        for own, inputs, outputs in zip(
            cotangent_avals["params"], self.inputs, self.outputs, strict=True
        ):
            wanted = frozenset(name for name, like in own.items() if like is not None)
            need = RequestedGradients(
                reached, wanted, tuple(edges[edge] for edge in inputs)
            )
            reached = bool(need)
            edges.update(dict.fromkeys(outputs, reached))
            needs.append(need)
        return tuple(needs)

    def _saves(self, needs) -> tuple[frozenset[str], ...]:
        """Returns, for each operation, which residuals its backward reads, by name."""
        saves: list[frozenset[str]] = []
        for window, op in windows(self.backward_ops):
            own = needs[window]
            saves.extend(op.saved(own) if any(own) else [frozenset()] * len(own))
        return tuple(saves)

    def _kept(self, residuals, saves):
        """Replaces residuals that this backward does not read by empty placeholders.

        A residual that only other requests would read is a placeholder, so the tree
        does not depend on the requested gradients.
        """
        possible = self._saves(tuple(_everything(op) for op in self.basic_ops))

        def keep(op, values, wanted, name):
            if name not in values:
                # The fused forward never produces this residual, whichever gradients
                # are requested. So there is no value that another use of the jaxpr
                # could keep, or that jax.vmap could map.
                return placeholder()
            return residual_or_placeholder(
                name in wanted, save(values[name], name, op.comm_name)
            )

        return tuple(
            {name: keep(op, values, wanted, name) for name in sorted(names)}
            for op, values, wanted, names in zip(
                self.basic_ops, residuals, saves, possible, strict=True
            )
        )

    def _likes(self, operands, needs):
        """Returns shapes and dtypes of the gradients of arrays between the operations.

        The arrays between operations that are fused do not exist at run time. Their
        types come from an abstract evaluation of the unfused operations.
        """
        if len(self.basic_ops) == 1:
            return (), {}
        types = []

        def run(operands):
            unfused = [FusedOperation((op,)) for op in self.basic_ops]
            xs, edges, _ = self._run(unfused, operands, [frozenset()] * len(unfused))
            types.extend(jax.tree.map(jax.typeof, (xs[:-1], edges)))

        jax.eval_shape(run, operands)
        xs, edges = types
        x_likes = tuple(
            aval_or_placeholder(need.x, x) for need, x in zip(needs, xs, strict=True)
        )
        wire_likes = {
            edge: aval_or_placeholder(bool(need), edges[edge])
            for need, outputs in zip(needs, self.outputs, strict=True)
            for edge in outputs
        }
        return x_likes, wire_likes

    def backward(self, residuals, cotangents, cotangent_avals):
        """Computes the gradients of the operands from the cotangents of the outputs.

        Runs the operations of `backward_ops` from the last to the first.
        """
        needs = self._needs(cotangent_avals)
        dy, d_results = cotangents
        d_wires = dict(d_results)
        x_likes, wire_likes = residuals["likes"]
        wire_likes = {**cotangent_avals["wires"], **wire_likes}
        d_params: list = [None] * len(needs)
        for window, op in reversed(windows(self.backward_ops)):
            saved = tuple(map(_present, residuals["ops"][window]))
            d_outputs = _rows(d_wires, self.outputs[window])
            with self._named(window, op):
                dy, d_params[window], d_inputs = _backward(
                    op, saved, dy, d_outputs, needs[window]
                )
            if window.start:
                dy = to_cotangent_aval(x_likes[window.start], dy)
            for edge, d in _pairs(self.inputs[window], d_inputs):
                d = to_cotangent_aval(wire_likes[edge], d)
                if d is not None:
                    before = d_wires.get(edge)
                    d_wires[edge] = d if before is None else before + d
        return {
            "x": dy,
            "params": tuple(
                {name: own.get(name) for name in like}
                for like, own in zip(cotangent_avals["params"], d_params, strict=True)
            ),
            "wires": {edge: d_wires.get(edge) for edge in cotangent_avals["wires"]},
        }

    @contextlib.contextmanager
    def _named(self, window, op):
        """Prefixes errors with the index and the label of the operation that failed."""
        try:
            yield
        except UbError as error:
            if str(error).startswith("operation "):
                raise
            names = ", ".join(basic.label for basic in op.basic_ops)
            raise type(error)(
                f"operation {self.first + window.start} ({names}): {error}"
            ) from error


def _rows(arrays, rows):
    """Replaces each extra tensor's number in `rows` by its array, or by None."""
    return tuple(tuple(arrays.get(edge) for edge in row) for row in rows)


def _pairs(rows, arrays) -> Iterator[tuple[int, jax.Array | None]]:
    """Yields each extra tensor's number with the array at the same position."""
    return zip(itertools.chain(*rows), itertools.chain(*arrays), strict=True)


def _backward(op, residuals, dy, d_extras, needs):
    arrived = dy is not None or any(d is not None for row in d_extras for d in row)
    if any(needs) and arrived:
        return op.backward(residuals, dy, d_extras, needs)
    # Nothing to compute: the base class returns the old values of overwritten
    # parameters, and None for all other gradients.
    return FusedOperation.backward(op, residuals, dy, d_extras, needs)


def _everything(op):
    return RequestedGradients(
        True, frozenset(op.specs()), (True,) * op.num_extra_inputs
    )


def _present(residuals):
    return {name: value for name, value in residuals.items() if value is not None}
