"""Parses HLO text into instructions, and finds their operands, users and dots."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]+)\}")
# Instructions that only move or convert data, and may separate collective and dot.
PASSED = frozenset(
    (
        "bitcast",
        "convert",
        "copy",
        "fusion",
        "get-tuple-element",
        "reshape",
        "transpose",
    )
)
_DOTS = ("dot", "convolution")
_MATMUL_CALLS = ("gemm", "matmul")
MAX_STEPS = 4

# Dtype, such as "bf16", and dimensions of an array.
Array = tuple[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    arrays: list[Array]  # the arrays of the result, which may be a tuple
    opcode: str
    operands: list[str]
    text: str

    @property
    def kind(self) -> str:
        """Returns the opcode, such as "all-gather", also for "all-gather-start"."""
        return self.opcode.removesuffix("-start")

    @property
    def called(self) -> str:
        """Returns the name of the computation that it calls, or ""."""
        found = _CALLED.search(self.text)
        return found[1] if found else ""

    @property
    def passes(self) -> bool:
        return self.opcode in PASSED or self.opcode.endswith("-done")


@dataclasses.dataclass(frozen=True)
class Dot:
    """A dot in HLO text: the number of elements of its operands and result, and K.

    `operands` are the names of the operands, or of those of the fusion with the dot.
    """

    instruction: Instruction
    operands: list[str]
    lhs: int
    rhs: int
    out: int
    contracting: int
    dtype: str


class Body:
    """The instructions of an HLO computation, with their operands and users by name."""

    def __init__(self, instructions: dict[str, Instruction]):
        self.instructions = instructions
        self.operands = {one.name: one.operands for one in instructions.values()}
        self.users: dict[str, list[str]] = collections.defaultdict(list)
        for name, used in self.operands.items():
            for operand in used:
                self.users[operand].append(name)

    def users_by_array(self, one: Instruction) -> list[list[str]]:
        """Returns, for each result array of a collective, the instructions using it."""
        if len(one.arrays) == 1:
            return [self.users[one.name]]
        found: list[list[str]] = [[] for _ in one.arrays]
        for name in (one.name, *self.users[one.name]):  # the second may be its "-done"
            for user in self.users[name]:
                used = self.instructions[user]
                index = _INDEX.search(used.text)
                if used.opcode == "get-tuple-element" and index:
                    found[int(index[1])].append(user)
        return found

    def around(
        self,
        reached: Iterable[str],
        neighbors: Mapping[str, list[str]],
        blocking: Collection[str] = (),
    ) -> Iterator[Instruction]:
        """Yields the instructions that few steps reach from `reached`, nearest first.

        A step is from an instruction to one of its `neighbors`, its users or operands.
        Only instructions in `PASSED` may be in between, and no fusions that call
        computations in `blocking`.
        """
        for _ in range(MAX_STEPS):
            known = self.instructions
            found = [known[name] for name in reached if name in known]
            yield from found
            passed = [one for one in found if one.passes and one.called not in blocking]
            reached = [name for one in passed for name in neighbors.get(one.name, ())]


def computations(text: str) -> Iterator[tuple[str, dict[str, Instruction]]]:
    """Yields the name and the instructions, by name, of each computation."""
    name, body = "", {}
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found:
            one = _instruction(*found.groups())
            body[one.name] = one
        elif line.strip() == "}":
            yield name, body
        else:
            head = _COMPUTATION.match(line)
            if head:
                name, body = head[1], {}


def _instruction(name, shape, opcode, rest):
    arrays = [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in _SHAPE.findall(shape)
    ]
    # "), " separates the operand list of an instruction from its attributes.
    operands = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        # An asynchronous start lists its operands before its results.
        arrays = arrays[len(operands) : 2 * len(operands)]
    return Instruction(name, arrays, opcode, operands, rest)


def bits(dtype: str) -> int:
    """Returns the number of bits of an element, such as 16 for "bf16"."""
    found = _BITS.search(dtype)
    return int(found[0]) if found else 8


def multiplies(one: Instruction) -> bool:
    """Returns whether an instruction is a dot, or calls a library's GEMM."""
    if one.opcode in _DOTS:
        return True
    target = one.text.partition('custom_call_target="')[2].partition('"')[0].lower()
    is_jax_ub = target.startswith("jax_ub$")
    return not is_jax_ub and any(word in target for word in _MATMUL_CALLS)


def dot_of(one: Instruction, body: Mapping[str, Instruction]) -> Dot:
    """Returns the sizes of the dot `one`; 0 for operands that are not in `body`."""
    known = [body[name].arrays for name in one.operands[:2] if name in body]
    # A library call may also return its workspace, as a second array.
    first = [arrays[0] if arrays else ("", [0]) for arrays in (*known, [], [])]
    (dtype, sizes), (_, right) = first[:2]
    lhs, rhs, out = (math.prod(each) for each in (sizes, right, one.arrays[0][1]))
    named = _CONTRACTING.search(one.text)
    if named and lhs:
        K = math.prod(sizes[int(axis)] for axis in named[1].split(","))
    else:
        # A dot of [M, K] and [K, N] has the result [M, N], and M K * K N / M N = K^2.
        K = math.isqrt(lhs * rhs // max(out, 1))
    return Dot(one, one.operands, lhs, rhs, out, K, dtype)
