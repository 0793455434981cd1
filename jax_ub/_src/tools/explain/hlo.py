"""Finds XLA's own collectives, and the dots next to them, in optimized HLO text."""

import dataclasses
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping

from jax_ub._src.tools.explain.instructions import (
    MAX_STEPS,
    PASSED,
    Array,
    Dot,
    Instruction,
    around,
    bits,
    communicates,
    computations,
    dot_of,
    group_size_and_axes,
    multiplies,
    named_mesh_in,
    source_lines,
    users_by_array,
)
from jax_ub._src.tools.trace.traces import ub_name_in

# XLA marks every fifth element of a long tuple with a comment such as /*index=5*/. The
# comments are removed before the text is parsed.
_COMMENT = re.compile(r"/\*index=\d+\*/")
_ENTRY = re.compile(r"^\s*ENTRY %?([\w.\-]+) ", re.MULTILINE)
_LABEL = re.compile(r'\blabel = \\?"([^"\\]*)')
_USERS, _OPERANDS = operator.attrgetter("users"), operator.attrgetter("operands")
# Maps the HLO opcode of a collective to the function of jax_ub that could replace the
# collective together with an adjacent dot.
_COULD_BE = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
_COLLECTIVES = (*_COULD_BE, "all-to-all", "collective-permute")
# Maps the opcode of a collective that reshards an array to the prefix of the JAX
# primitives that lower to the collective. If the `op_name` of a collective ends with a
# different primitive, XLA itself has added the collective.
_RESHARDS = {
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
# Opcodes of instructions that only move or convert values. A fusion of a dot and such
# instructions computes only the dot, so a reduction of the fusion's result sums the
# results of the dot.
_MOVES = PASSED - {"fusion"} | {"bitcast-convert", "constant", "parameter", "tuple"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of XLA, or the part for one array of a combined collective.

    If it is adjacent to a dot, one jax_ub call could replace both.

    Attributes:
        scope: the JAX name stack of the collective.
        kind: HLO opcode, such as "all-gather".
        num_ranks: number of devices in a group.
        moved_bytes: bytes that each device of a group sends.
        dtype: dtype of the dot's operands, or of the array if there is no dot.
        source: line of the user's code, or "" if it is unknown.
        axes: mesh axes of a group, empty if unknown.
        num_combined: number of arrays that XLA has combined, of which this is one.
        could_be: function that could replace the collective and the dot; "" without
            a dot.
        sizes: global M, K and N of this function, or None if the HLO text does not
            contain them.
        is_of_kernel: whether the collective sums a gradient in the backward pass, or
            gathers an argument of the program that is the right operand of the dot.
            Also true for combined arrays without a dot that are such a gradient or any
            argument of the program.
        sums_parameter_gradient: whether the array has the shape of an argument of the
            program, and no argument is an operand of the dot: it is x^T dy, which no
            call of jax_ub sums. Also true for other gradients that XLA has combined
            with such an array, such as those of biases.
        is_reshard: whether XLA has added the collective where a call of jax_ub expects
            another sharding. `scope` is then the name of the call.
        gathered: shape of the result of an all-gather without a dot whose operand is
            no argument of the program.
    """

    scope: str
    kind: str
    num_ranks: int
    moved_bytes: int
    dtype: str
    source: str = ""
    axes: tuple[str, ...] = ()
    num_combined: int = 1
    could_be: str = ""
    sizes: tuple[int, int, int] | None = None
    is_of_kernel: bool = False
    sums_parameter_gradient: bool = False
    is_reshard: bool = False
    gathered: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        return bits(self.dtype) // 8

    def is_reshard_over(self, axes: Collection[str] | None) -> bool:
        return self.is_reshard and not set(self.axes).isdisjoint(axes or ())


def collectives(
    text: str, mesh: Mapping[str, int] | None = None
) -> Iterator[Collective]:
    """Finds XLA's collectives in optimized HLO text, and pairs each with a nearby dot.

    An all-gather is paired with the nearest dot that uses its result, a reduction with
    the nearest dot whose result it sums. If XLA has combined several collectives, and
    one of the arrays has a dot, yields a `Collective` for each array.

    Args:
        text: the HLO text.
        mesh: the sizes of the mesh axes. None takes those that the text names.
    """
    program = _Program(_COMMENT.sub("", text), mesh or named_mesh_in(text))
    for name, instructions in program.computations.items():
        for one in instructions.values():
            if one.kind in _COLLECTIVES and communicates(one.text):
                yield from program.collectives(one, is_in_loop=name != program.entry)


class _Program:
    """The parsed HLO of a program. Finds dots and jax_ub calls near a collective."""

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.computations = computations(text)
        self._lines = source_lines(text)
        self._mesh = mesh
        # Maps the name of each computation that contains a dot to its first dot.
        self._dots = {
            name: dot_of(one)
            for name, instructions in self.computations.items()
            for one in reversed(instructions.values())
            if multiplies(one)
        }
        # Names of the computations with an instruction that is neither a dot nor in
        # `_MOVES`.
        self._impure = {
            name
            for name, instructions in self.computations.items()
            for one in instructions.values()
            if one.opcode not in _MOVES and not multiplies(one)
        }
        # Names of the computations that only move or convert values.
        self._moving = self.computations.keys() - self._impure - self._dots.keys()
        entry = _ENTRY.search(text)
        self.entry = entry[1] if entry else ""
        instructions = self.computations.get(self.entry, {}).values()
        arguments = (one for one in instructions if one.opcode == "parameter")
        self._argument_shapes = [one.arrays[0][1] for one in arguments if one.arrays]

    def collectives(self, one: Instruction, *, is_in_loop) -> Iterator[Collective]:
        """Yields a collective, or a part for each of its arrays.

        It is divided if a dot uses or computes any of the arrays.
        """
        num_ranks, axes = group_size_and_axes(one.text, self._mesh)
        sent = [_moved_bytes(one.kind, array, num_ranks) for array in one.arrays]
        whole = Collective(
            one.op_name or one.name,
            one.kind,
            num_ranks,
            moved_bytes=sum(sent),
            dtype=one.arrays[0][0] if one.arrays else "",
            source=self._lines.get(one.stack_frame, ""),
            axes=axes,
        )
        users = users_by_array(one)
        dots = self._dots_next_to(one, users)
        if not any(dots):
            yield self._without_dot(whole, one)
            return
        found = []
        # If the HLO text does not contain the shapes of all results, `one.arrays` is
        # shorter than the list of operands, so the zip is not strict.
        for i, (array, dot) in enumerate(zip(one.arrays, dots, strict=False)):
            part = dataclasses.replace(
                whole,
                moved_bytes=sent[i],
                dtype=array[0],
                num_combined=len(one.arrays),
            )
            if dot is None:
                found.append(self._combined(part, one, i, users[i]))
            else:
                found.append(self._paired(part, one, i, users[i], dot, is_in_loop))
        sums_gradient = any(part.sums_parameter_gradient for part in found)
        for part in found:
            if part.could_be or not (part.is_of_kernel and sums_gradient):
                yield part
            else:
                yield dataclasses.replace(part, sums_parameter_gradient=True)

    def _dots_next_to(self, one, users) -> list[Dot | None]:
        """Returns the dot that uses or computes each array of a collective."""
        if one.kind == "all-gather":
            return [self._nearest_dot(start, _USERS) for start in users]
        if one.kind not in _COULD_BE or not self._may_sum(one):
            return []
        return [
            self._nearest_dot([operand], _OPERANDS, self._impure)
            for operand in one.operands
        ]

    def _may_sum(self, one: Instruction) -> bool:
        """Returns whether a reduction can be a sum, and not, for example, a maximum."""
        called = self.computations.get(one.called, {})
        opcodes = {each.opcode for each in called.values()}
        return opcodes <= {"parameter", "add", "convert"}

    def _without_dot(self, whole, one) -> Collective:
        primitive = one.op_name.rpartition("/")[2]
        is_added = not primitive.startswith(_RESHARDS.get(one.kind, ""))
        if is_added and (call := _nearest_call(one)):
            whole = dataclasses.replace(whole, scope=call, is_reshard=True)
        if one.kind == "all-gather" and not self._gathers_argument(one):
            return dataclasses.replace(whole, gathered=tuple(one.arrays[0][1]))
        return whole

    def _combined(self, part, one, index, users) -> Collective:
        """Returns the part of a collective for an array without an adjacent dot."""
        near = [*one.operands[index : index + 1], *users, one]
        scope = next((each.op_name for each in near if each.op_name), one.name)
        if one.kind == "all-gather":
            is_of_kernel = self._gathers_argument(one, index)
        else:
            is_of_kernel = "transpose(" in scope
        return dataclasses.replace(part, scope=scope, is_of_kernel=is_of_kernel)

    def _paired(self, part, one, index, users, dot, is_in_loop) -> Collective:
        """Returns the part of a collective for an array with an adjacent dot."""
        array = one.arrays[index]
        # The name of a combined collective refers to all collectives in it. The name
        # and source line of the dot are used instead.
        is_named_by_dot = len(one.arrays) > 1 and dot.instruction.op_name
        source = dot.instruction if is_named_by_dot else one
        sums_gradient = False
        if one.kind == "all-gather":
            is_right = math.prod(array[1]) == dot.rhs != dot.lhs
            is_of_kernel = is_right and self._gathers_argument(one, index)
        else:
            is_of_kernel = dot.instruction.is_in_backward_pass
            sums_gradient = (
                is_of_kernel
                and self._sums_parameter_gradient(array, dot, is_in_loop)
                and not self._is_read_by_backward_pass(users)
            )
        return dataclasses.replace(
            part,
            scope=source.op_name or one.name,
            dtype=dot.dtype,
            source=self._lines.get(source.stack_frame, ""),
            could_be=_COULD_BE[one.kind],
            sizes=_global_sizes(array, one.kind, dot, part.num_ranks),
            is_of_kernel=is_of_kernel,
            sums_parameter_gradient=sums_gradient,
        )

    def _gathers_argument(self, one: Instruction, index: int = 0) -> bool:
        """Returns whether operand `index` of an all-gather is a program argument."""
        return not one.operands or self._is_argument(one.operands[index])

    def _is_argument(self, one: Instruction) -> bool:
        """Returns whether an instruction is an HLO parameter, or a copy of one.

        The copy may be reshaped, transposed or converted, in fewer than `MAX_STEPS`
        instructions. A constant counts as a parameter.
        """
        for _ in range(MAX_STEPS):
            if one.opcode == "parameter":
                return True
            if one.opcode not in _MOVES and one.called not in self._moving:
                return False
            if not one.operands:
                return True
            one = one.operands[0]
        return False

    def _sums_parameter_gradient(self, array: Array, dot: Dot, is_in_loop) -> bool:
        """Returns whether `array`, a sum over ranks, is the gradient of a parameter.

        The gradient of a parameter has the shape of an argument of the program, or the
        transposed shape. The gradient of an activation is dy w^T instead, where w is an
        argument. In the body of a loop, where a scan has sliced the arguments, w has
        the shape of a slice.
        """
        shape = sorted(array[1])
        if not is_in_loop:
            has_kernel = any(map(self._is_argument, dot.operands))
            return shape in map(sorted, self._argument_shapes) and not has_kernel
        layers = [sorted(stacked[1:]) for stacked in self._argument_shapes]
        factors = [array for one in dot.operands for array in one.arrays]
        has_kernel = any(sorted(sizes) in layers for _, sizes in factors)
        return shape in layers and not has_kernel

    def _is_read_by_backward_pass(self, users: list[Instruction]) -> bool:
        """Returns whether a GEMM of the backward pass reads a gradient.

        Such a gradient is the gradient of an activation, which earlier layers read.
        `users` are the instructions that read the gradient. The result is also True if
        other instructions, but no GEMMs, are in between.
        """
        reached, seen = users, set(users)
        while reached:
            following: list[Instruction] = []
            for one in reached:
                dot = self._dots.get(one.called)
                if dot is None and not multiplies(one) and not one.is_call:
                    following += one.users
                elif (dot.instruction if dot else one).is_in_backward_pass:
                    return True
            reached = [each for each in dict.fromkeys(following) if each not in seen]
            seen.update(reached)
        return False

    def _nearest_dot(self, reached, neighbors, impure=frozenset()) -> Dot | None:
        """Returns the dot that is nearest to the instructions `reached`, or None.

        `neighbors` returns the users or the operands of an instruction.
        """
        for one in around(reached, neighbors, impure):
            if multiplies(one):
                return dot_of(one)
            if one.called in self._dots and one.called not in impure:
                dot = self._dots[one.called]
                return dataclasses.replace(dot, operands=one.operands)
        return None


def _nearest_call(one):
    """Returns the name of the nearest call of jax_ub that reads or computes `one`."""
    for neighbors in (_USERS, _OPERANDS):
        for near in around(neighbors(one), neighbors):
            label = _LABEL.search(near.text)
            if near.is_call and label:
                return ub_name_in(label[1]) or label[1]
    return None


def _moved_bytes(kind, array, num_ranks):
    """Returns the bytes that each rank sends in a collective with this result array.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    dtype, sizes = array
    share = 1 if kind == "collective-permute" else (num_ranks - 1) / num_ranks
    # The result of a reduce-scatter is 1 / num_ranks of the array that is reduced. An
    # all-reduce sends the array twice, like a reduce-scatter and an all-gather.
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
