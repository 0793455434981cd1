"""Finds XLA's own collectives, and the dots next to them, in optimized HLO text."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jax_ub._src.tools.explain.instructions import (
    MAX_STEPS,
    PASSED,
    Array,
    Body,
    Dot,
    Instruction,
    SourceLines,
    bits,
    communicates,
    computations,
    dot_of,
    group_size_and_axes,
    multiplies,
    named_mesh_in,
)
from jax_ub._src.tools.trace.traces import ub_name_in

# XLA numbers every fifth element of a long tuple by a comment, such as /*index=5*/.
_COMMENT = re.compile(r"/\*index=\d+\*/")
_ENTRY = re.compile(r"^\s*ENTRY %?([\w.\-]+) ", re.MULTILINE)
_LABEL = re.compile(r'\blabel = \\?"([^"\\]*)')
# The function of jax_ub that could replace a collective and an adjacent dot, by the
# HLO opcode of the collective.
_COULD_BE = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
_COLLECTIVES = (*_COULD_BE, "all-to-all", "collective-permute")
# HLO opcodes of collectives that change how an array is sharded, with the prefix of
# the JAX primitives that lower to each. If the `op_name` of a collective ends with
# another primitive, XLA has added the collective itself.
_RESHARDS = {
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
# Instructions that only move or convert values. If a fusion consists of a dot and of
# these, a reduction of the fusion's result still sums the result of the dot.
_MOVES = PASSED - {"fusion"} | {"bitcast-convert", "constant", "parameter", "tuple"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A collective of XLA and an adjacent dot, which one jax_ub call could replace.

    `scope` is the collective's name stack. Each of the `num_ranks` devices of a group
    sends `moved_bytes`. `sizes` are the global M, K and N of the function `could_be`,
    or None if the HLO text does not contain them. `dtype` is that of the dot's
    operands, and `source` is the line of the user's code, or "" if it is unknown.
    `axes` are the mesh axes of a group, empty if unknown. `is_of_kernel` is whether the
    collective sums a gradient in the backward pass, or gathers an argument of the
    program that is the right operand of the dot. `sums_parameter_gradient` is whether
    the array has the shape of an argument of the program, and no argument is an operand
    of the dot: it is x^T dy, which no call of jax_ub sums. XLA has combined
    `num_combined` arrays, of which this is one, in the collective.
    """

    scope: str
    collective: str
    could_be: str
    num_ranks: int
    moved_bytes: int
    sizes: tuple[int, int, int] | None
    dtype: str
    source: str = ""
    axes: tuple[str, ...] = ()
    is_of_kernel: bool = False
    sums_parameter_gradient: bool = False
    num_combined: int = 1

    @property
    def itemsize(self) -> int:
        return bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """An array with no dot next to it, which XLA sends in one collective with others.

    For example, the gradient of a bias, combined with arrays of pairs. The fields are
    as in `Pair`, except that `is_of_kernel` is also true for other arguments of the
    program that are gathered. `sums_parameter_gradient` is whether such a gradient is
    among the combined arrays.
    """

    scope: str
    collective: str
    moved_bytes: int
    axes: tuple[str, ...]
    is_of_kernel: bool
    sums_parameter_gradient: bool


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A collective that XLA adds where a call of jax_ub expects another sharding.

    `call` is the name of the call. The other fields are as in `Pair`.
    """

    call: str
    collective: str
    moved_bytes: int
    dtype: str
    source: str
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """The collectives of XLA in a compiled program, paired with dots where possible.

    `others` has the number of collectives without an adjacent dot, by opcode.
    `gathered` has the results' shapes of those all-gathers among them whose operand is
    no argument of the program, and `reshards` has those that XLA adds next to a call.
    `unpaired` has the arrays of combined collectives of which others are in `pairs`.
    """

    pairs: tuple[Pair, ...]
    others: dict[str, int]
    gathered: tuple[tuple[int, ...], ...] = ()
    reshards: tuple[Reshard, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()


def collectives(text: str, mesh: Mapping[str, int] | None = None) -> Found:
    """Finds XLA's collectives, and the dots next to them, in optimized HLO text.

    An all-gather is paired with the nearest dot that uses its result, a reduction with
    the nearest dot whose result it sums. If XLA has combined several collectives, each
    array that is next to a dot has a pair, and the others are unpaired.

    Args:
        text: the HLO text.
        mesh: the sizes of the mesh axes. None takes those that the text names.
    """
    program = _Program(_COMMENT.sub("", text), mesh or named_mesh_in(text))
    pairs: list[Pair] = []
    gathered: list[tuple[int, ...]] = []
    reshards: list[Reshard] = []
    unpaired: list[Unpaired] = []
    others: collections.Counter[str] = collections.Counter()
    for one, body in program.collectives():
        dots = program.dots(one, body)
        if any(dots):
            found = program.pairs(one, body, dots)
            pairs += found
            unpaired += program.unpaired(one, body, dots, found)
            continue
        others[one.kind] += 1
        if one.kind == "all-gather" and not program.gathers_argument(one, body):
            gathered.append(tuple(one.arrays[0][1]))
        reshards += program.reshards(one, body)
    return Found(
        tuple(pairs), dict(others), tuple(gathered), tuple(reshards), tuple(unpaired)
    )


class _Program:
    """The HLO of a compiled program, to find dots and calls next to a collective."""

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self._computations = dict(computations(text))
        self._lines = SourceLines(text)
        self._mesh = mesh
        # {computation: its first dot}, for the computations that contain a dot.
        self._dots = {
            name: dot_of(one, body)
            for name, body in self._computations.items()
            for one in reversed(body.values())
            if multiplies(one)
        }
        self._impure = {
            name
            for name, body in self._computations.items()
            if not all(o.opcode in _MOVES or multiplies(o) for o in body.values())
        }
        entry = _ENTRY.search(text)
        self._entry = self._computations.get(entry[1] if entry else "", {})
        arguments = (o for o in self._entry.values() if o.opcode == "parameter")
        self._argument_shapes = [one.arrays[0][1] for one in arguments if one.arrays]

    def collectives(self) -> Iterator[tuple[Instruction, Body]]:
        for instructions in self._computations.values():
            body = Body(instructions)
            for one in instructions.values():
                if one.kind in _COLLECTIVES and communicates(one.text):
                    yield one, body

    def dots(self, one: Instruction, body: Body) -> list[Dot | None]:
        """Returns the dot that uses or computes each array of a collective, or None."""
        if one.kind == "all-gather":
            starts = body.users_by_array(one)
            return [self._nearest_dot(start, body, body.users) for start in starts]
        if one.kind not in _COULD_BE or not _may_sum(one, self._computations):
            return []
        return [
            self._nearest_dot([name], body, body.operands, self._impure)
            for name in one.operands
        ]

    def pairs(self, one: Instruction, body: Body, dots: list[Dot | None]):
        """Pairs each array of a collective with its dot in `dots`, if it has one."""
        # Not strict: if the HLO text does not contain the shapes of all results,
        # `one.arrays` has fewer entries than the collective has operands.
        pairs = enumerate(zip(one.arrays, dots, strict=False))
        return [self._pair(one, body, i, *pair) for i, pair in pairs if pair[1]]

    def unpaired(
        self,
        one: Instruction,
        body: Body,
        dots: list[Dot | None],
        pairs: list[Pair],
    ) -> Iterator[Unpaired]:
        """Yields an `Unpaired` for each array of a collective that has no dot."""
        num_ranks, axes = group_size_and_axes(one.text, self._mesh)
        sums_gradient = any(pair.sums_parameter_gradient for pair in pairs)
        users = body.users_by_array(one)
        for i, (array, dot) in enumerate(zip(one.arrays, dots, strict=False)):
            if dot is not None:
                continue
            near = [*_known([*one.operands[i : i + 1], *users[i]], body), one]
            scope = next((each.op_name for each in near if each.op_name), one.name)
            if one.kind == "all-gather":
                is_of_kernel = self.gathers_argument(one, body, i)
            else:
                is_of_kernel = "transpose(" in scope
            yield Unpaired(
                scope=scope,
                collective=one.kind,
                moved_bytes=_moved_bytes(one.kind, array, num_ranks),
                axes=axes,
                is_of_kernel=is_of_kernel,
                sums_parameter_gradient=is_of_kernel and sums_gradient,
            )

    def gathers_argument(self, one: Instruction, body: Body, index: int = 0) -> bool:
        """Returns whether operand `index` of an all-gather is a program argument."""
        return not one.operands or self._is_argument(one.operands[index], body)

    def _is_argument(self, name: str, body: Body) -> bool:
        """Returns whether an instruction is an HLO parameter, or a copy of one.

        The copy may be reshaped, transposed or converted, in fewer than `MAX_STEPS`
        instructions. A constant, or an instruction that is not in `body`, counts as a
        parameter.
        """
        for _ in range(MAX_STEPS):
            one = body.instructions.get(name)
            if one is None or one.opcode == "parameter":
                return True
            if one.opcode not in _MOVES and not self._only_moves(one):
                return False
            if not one.operands:
                return True
            name = one.operands[0]
        return False

    def _sums_parameter_gradient(self, array: Array, dot: Dot, body: Body) -> bool:
        """Returns whether `array`, a sum over ranks, is the gradient of a parameter.

        It has the shape of an argument of the program, or is transposed. The gradient
        of an activation is dy w^T instead, where w is an argument. In the body of a
        loop, where a scan has sliced the arguments, w only has the shape of one.
        """
        shape = sorted(array[1])
        if body.instructions is self._entry:
            has_kernel = any(self._is_argument(name, body) for name in dot.operands)
            return shape in map(sorted, self._argument_shapes) and not has_kernel
        layers = [sorted(stacked[1:]) for stacked in self._argument_shapes]
        factors = [a for one in _known(dot.operands, body) for a in one.arrays]
        has_kernel = any(sorted(sizes) in layers for _, sizes in factors)
        return shape in layers and not has_kernel

    def _is_read_by_backward_pass(self, users: list[str], body: Body) -> bool:
        """Returns whether a GEMM of the backward pass reads a gradient.

        Then it is the gradient of an activation, which earlier layers read. `users`
        are the instructions that read the gradient. The result is also True if other
        instructions, but no GEMMs, are in between.
        """
        reached, seen = users, set(users)
        while reached:
            following: list[str] = []
            for one in _known(reached, body):
                dot = self._dots.get(one.called)
                if dot is None and not multiplies(one) and not one.is_call:
                    following += body.users[one.name]
                elif (dot.instruction if dot else one).is_in_backward_pass:
                    return True
            reached = [each for each in dict.fromkeys(following) if each not in seen]
            seen.update(reached)
        return False

    def _only_moves(self, one: Instruction) -> bool:
        """Returns whether an instruction is a fusion that changes no value."""
        has_no_dot = one.called not in self._impure and one.called not in self._dots
        return one.opcode == "fusion" and bool(one.called) and has_no_dot

    def reshards(self, one: Instruction, body: Body) -> Iterator[Reshard]:
        """Yields a `Reshard` if XLA has added collective `one` for a jax_ub call."""
        primitive = one.op_name.rpartition("/")[2]
        if one.kind not in _RESHARDS or primitive.startswith(_RESHARDS[one.kind]):
            return
        calls = (_nearest_call(one, body, each) for each in (body.users, body.operands))
        if call := next(filter(None, calls), None):
            num_ranks, axes = group_size_and_axes(one.text, self._mesh)
            yield Reshard(
                call,
                one.kind,
                sum(_moved_bytes(one.kind, array, num_ranks) for array in one.arrays),
                one.arrays[0][0],
                self._lines.of(one.text),
                axes,
            )

    def _nearest_dot(self, reached, body, neighbors, impure=frozenset()) -> Dot | None:
        """Follows `neighbors` from `reached`; returns the nearest dot, or None."""
        for one in body.around(reached, neighbors, impure):
            if multiplies(one):
                return dot_of(one, body.instructions)
            if one.called in self._dots and one.called not in impure:
                dot = self._dots[one.called]
                return dataclasses.replace(dot, operands=one.operands)
        return None

    def _pair(self, one, body, index, array, dot):
        num_ranks, axes = group_size_and_axes(one.text, self._mesh)
        # The name of a combined collective joins the names of all collectives in it, so
        # the dot's name and source line are used instead.
        is_named_by_dot = len(one.arrays) > 1 and dot.instruction.op_name
        source = dot.instruction if is_named_by_dot else one
        sums_gradient = False
        if one.kind == "all-gather":
            is_right = math.prod(array[1]) == dot.rhs != dot.lhs
            is_of_kernel = is_right and self.gathers_argument(one, body, index)
        else:
            is_of_kernel = dot.instruction.is_in_backward_pass
            users = body.users_by_array(one)[index]
            sums_gradient = (
                is_of_kernel
                and self._sums_parameter_gradient(array, dot, body)
                and not self._is_read_by_backward_pass(users, body)
            )
        return Pair(
            scope=source.op_name or one.name,
            collective=one.kind,
            could_be=_COULD_BE[one.kind],
            num_ranks=num_ranks,
            moved_bytes=_moved_bytes(one.kind, array, num_ranks),
            sizes=_global_sizes(array, one.kind, dot, num_ranks),
            dtype=dot.dtype,
            source=self._lines.of(source.text),
            axes=axes,
            is_of_kernel=is_of_kernel,
            sums_parameter_gradient=sums_gradient,
            num_combined=len(one.arrays),
        )


def _may_sum(one, computations):
    """Returns whether a reduction may be a sum, and is not, for example, a maximum."""
    body = computations.get(one.called, {})
    return {each.opcode for each in body.values()} <= {"parameter", "add", "convert"}


def _known(names, body):
    return (body.instructions[name] for name in names if name in body.instructions)


def _nearest_call(one, body, neighbors):
    """Returns the name of the nearest jax_ub call among the neighbors, or None."""
    for near in body.around(neighbors.get(one.name, ()), neighbors):
        label = _LABEL.search(near.text)
        if near.is_call and label:
            return ub_name_in(label[1]) or label[1]
    return None


def _moved_bytes(kind, array, num_ranks):
    """Returns how many bytes each rank sends in a collective with this result array.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    dtype, sizes = array
    share = 1 if kind == "collective-permute" else (num_ranks - 1) / num_ranks
    # A reduce-scatter's result is 1 / num_ranks of the reduced array. An all-reduce
    # sends its array twice.
    whole = num_ranks if kind == "reduce-scatter" else 2 if kind == "all-reduce" else 1
    return round(share * whole * (math.prod(sizes) * bits(dtype) // 8))


def _global_sizes(array, kind, dot, num_ranks):
    K = dot.contracting
    if min(dot.lhs, dot.rhs, dot.out, K) < 1:
        return None
    if kind != "all-gather":
        M = max(dot.lhs // K, 1)
        return M, num_ranks * K, max(dot.out // M, 1)
    # M is the number of rows of the gathered operand, which may be the left or the
    # right operand of the dot.
    gathered = math.prod(array[1])
    M = max((dot.rhs if gathered == dot.rhs else dot.lhs) // K, 1)
    return M, K, num_ranks * max(dot.out // M, 1)
