"""A run of basic operations that is differentiated as one."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax

from jax_ub.errors import UbError
from jax_ub.ops.channels import Port
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Needs,
    Residuals,
    expand,
)
from jax_ub.rules.fused_group import fit, like_if
from jax_ub.rules.vjp import placeholder, save


@dataclasses.dataclass(frozen=True)
class FusibleGroup:
    """Forward and backward windows over the same basic operations.

    It is as short as it can be: where a forward window and a backward window end
    together, the next group begins, so that JAX itself finds out which groups have a
    gradient, and adds up what comes back from several consumers.

    Operands are a dict of "x", "params", "extra_inputs" and "keys"; the last three are
    tuples with one entry for each operation. Results are y and the extra outputs.

    Attributes:
        forward_ops: what computes the results.
        backward_ops: what computes the gradients.
        first: the place of the first operation among those of the fuser.
        sources: for each operation and extra input, the output that it takes, counted
            from the group's first operation, or None: it comes from outside.
        is_result: for each operation and extra output, whether it is wanted outside.
    """

    forward_ops: tuple[FusedOperation, ...]
    backward_ops: tuple[FusedOperation, ...]
    first: int
    sources: tuple[tuple[Port | None, ...], ...]
    is_result: tuple[tuple[bool, ...], ...]

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The operations, unfused."""
        return expand(self.forward_ops)

    def forward(self, operands, needs):
        """Runs the forward windows, one after another."""
        op_needs = self._op_needs(needs)
        saves = self._saves(op_needs)
        x = operands["x"]
        residuals: list[Residuals] = []
        ports: dict[Port, jax.Array | None] = {}
        for first, op in _windows(self.forward_ops):
            last = first + len(op.basic_ops)
            params = tuple(_with_key(operands, i) for i in range(first, last))
            extras = tuple(
                self._extra_inputs(operands, ports, i) for i in range(first, last)
            )
            with self._named(first, op):
                save = tuple(saves[first:last])
                x, outputs, saved = op.forward(params, x, extras, save)
            residuals.extend(saved)
            for i, arrays in enumerate(outputs, first):
                ports.update({(i, j): array for j, array in enumerate(arrays)})
        extra_outputs = tuple(
            tuple(ports[i, j] if wanted else None for j, wanted in enumerate(row))
            for i, row in enumerate(self.is_result)
        )
        kept = {"ops": self._kept(residuals, saves), "likes": ()}
        if len(self.basic_ops) > 1:
            kept["likes"] = self._likes(operands, op_needs)
        return (x, extra_outputs), kept

    def _extra_inputs(self, operands, ports, place):
        return tuple(
            given if source is None else ports[source]
            for given, source in zip(
                operands["extra_inputs"][place], self.sources[place], strict=True
            )
        )

    def _op_needs(self, needs) -> list[Needs]:
        """What each operation has to compute so that the group's needs are met."""
        reached, op_needs, ports = needs["x"], [], set()
        for i, op in enumerate(self.basic_ops):
            extras = tuple(
                given if source is None else source in ports
                for given, source in zip(
                    needs["extra_inputs"][i], self.sources[i], strict=True
                )
            )
            wanted = {name for name, need in needs["params"][i].items() if need}
            need = Needs(reached, frozenset(wanted), extras)
            op_needs.append(need)
            reached = bool(need)
            if reached:
                ports |= {(i, j) for j in range(op.num_extra_outputs)}
        return op_needs

    def _saves(self, op_needs) -> list[frozenset[str]]:
        saves: list[frozenset[str]] = []
        for first, op in _windows(self.backward_ops):
            needs = tuple(op_needs[first : first + len(op.basic_ops)])
            nothing = (frozenset[str](),) * len(needs)
            saves.extend(op.saved(needs) if any(needs) else nothing)
        return saves

    def _kept(self, residuals, saves):
        """The residuals that are read, and placeholders for what others would read."""
        names = self._saves([_everything(op) for op in self.basic_ops])
        return tuple(
            {
                name: save(values[name], name)
                if name in wanted and name in values
                else placeholder()
                for name in sorted(possible)
            }
            for values, wanted, possible in zip(residuals, saves, names, strict=True)
        )

    def _likes(self, operands, op_needs):
        """The type of every activation inside the group, where one is needed.

        A fused window never makes those inside it, so they are traced abstractly.
        """
        types, extra_types = self._abstract(operands)
        likes = tuple(
            like_if(need.x, aval) for need, aval in zip(op_needs, types, strict=True)
        )
        internal = tuple(
            tuple(map(like_if, need.extra_inputs, row))
            for need, row in zip(op_needs, extra_types, strict=True)
        )
        return likes, internal

    def _abstract(self, operands):
        types, extra_types = [], []

        def run(operands):
            x = operands["x"]
            ports: dict[Port, jax.Array | None] = {}
            for i, op in enumerate(self.basic_ops):
                types.append(jax.typeof(x))
                extras = self._extra_inputs(operands, ports, i)
                extra_types.append(
                    tuple(
                        None if source is None else jax.typeof(extra)
                        for extra, source in zip(extras, self.sources[i], strict=True)
                    )
                )
                x, outputs, _ = op.forward(
                    _with_key(operands, i), x, extras, frozenset()
                )
                ports.update({(i, j): array for j, array in enumerate(outputs)})

        jax.eval_shape(run, operands)
        return types, extra_types

    def backward(self, residuals, cotangents, needs):
        """Runs the backward windows, the last one first."""
        op_needs = self._op_needs(needs)
        dy, d_outputs = cotangents
        ports = {
            (i, j): d
            for i, row in enumerate(d_outputs)
            for j, d in enumerate(row)
            if d is not None
        }
        likes, extra_likes = residuals["likes"] or ((), ())
        d_params: list = [{}] * len(op_needs)
        d_inputs: list = [()] * len(op_needs)
        for first, op in reversed(_windows(self.backward_ops)):
            places = range(first, first + len(op.basic_ops))
            saved = tuple(_present(residuals["ops"][i]) for i in places)
            window = tuple(op_needs[i] for i in places)
            d_extras = tuple(
                tuple(
                    ports.get((i, j))
                    for j in range(self.basic_ops[i].num_extra_outputs)
                )
                for i in places
            )
            with self._named(first, op):
                dy, params, inputs = _backward(op, saved, dy, d_extras, window)
            if first:
                dy = fit(likes[first], dy)
            for i, params_i, inputs_i in zip(places, params, inputs, strict=True):
                d_params[i] = _complete(needs["params"][i], params_i)
                d_inputs[i] = self._hand_back(i, inputs_i, extra_likes, ports)
        return {
            "x": dy,
            "params": tuple(d_params),
            "extra_inputs": tuple(d_inputs),
            "keys": tuple(None for _ in op_needs),
        }

    def _hand_back(self, place, d_inputs, extra_likes, ports):
        """Adds the gradients of channels to their outputs', and returns the others."""
        outside = []
        for j, (d, source) in enumerate(
            zip(d_inputs, self.sources[place], strict=True)
        ):
            outside.append(d if source is None else None)
            if source is None or d is None:
                continue
            d = fit(extra_likes[place][j], d)
            if d is not None:
                ports[source] = ports[source] + d if source in ports else d
        return tuple(outside)

    @contextlib.contextmanager
    def _named(self, first, op):
        """Says in errors which of the operations they are about."""
        try:
            yield
        except UbError as error:
            if str(error).startswith("operation "):
                raise
            names = ", ".join(basic.label for basic in op.basic_ops)
            raise type(error)(
                f"operation {self.first + first} ({names}): {error}"
            ) from error


def _windows(ops: Sequence[FusedOperation]) -> list[tuple[int, FusedOperation]]:
    """Each operation with the place of its first basic one."""
    windows, place = [], 0
    for op in ops:
        windows.append((place, op))
        place += len(op.basic_ops)
    return windows


def _with_key(operands, place):
    key = operands["keys"][place]
    params = operands["params"][place]
    return params if key is None else {**params, "key": key}


def _backward(op, residuals, dy, d_extras, needs):
    arrived = dy is not None or any(d is not None for row in d_extras for d in row)
    if any(needs) and arrived:
        return op.backward(residuals, dy, d_extras, needs)
    # With nothing to compute, each basic operation says what it keeps.
    return FusedOperation.backward(op, residuals, dy, d_extras, needs)


def _everything(op):
    return Needs(True, frozenset(op.specs()), (True,) * op.num_extra_inputs)


def _present(residuals):
    return {name: value for name, value in residuals.items() if value is not None}


def _complete(needs, d_params):
    return {name: d_params.get(name) for name in needs}
