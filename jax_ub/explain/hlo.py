"""What XLA does by itself: its collectives next to its dots, in the compiled text."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
# The groups of a collective: listed, as a shape of the iota, or as axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")

# Which dot could be one call with a collective, and which call that is.
_GATHERS = {"all-gather": "all_gather_matmul"}
_REDUCTIONS = {
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
_OTHERS = ("all-to-all", "collective-permute")
# Between a collective and a dot there may be what only moves or converts.
_PASSED = frozenset(
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
_MAX_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Pair:
    """A collective of XLA's and the dot next to it, which could be one call."""

    scope: str
    collective: str
    could_be: str
    num_ranks: int
    moved_bytes: int


@dataclasses.dataclass(frozen=True)
class Found:
    """All of XLA's collectives in a program: pairs with dots, and the rest by name."""

    pairs: tuple[Pair, ...]
    others: dict[str, int]


@dataclasses.dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: list[str]
    text: str


def collectives(text: str) -> Found:
    """Reads a program's optimised HLO."""
    computations = dict(_computations(text))
    with_dots = {
        name
        for name, body in computations.items()
        if any(_multiplies(one) for one in body.values())
    }
    pairs = []
    others: collections.Counter[str] = collections.Counter()
    for body in computations.values():
        users = _users(body)
        for one in body.values():
            kind = one.opcode.removesuffix("-start")
            if kind in _GATHERS:
                near = _near(one.name, users, body, with_dots)
            elif kind in _REDUCTIONS:
                near = _near(one.name, _operands(body), body, with_dots)
            elif kind in _OTHERS:
                near = False
            else:
                continue
            if near:
                pairs.append(_pair(one, kind))
            else:
                others[kind] += 1
    return Found(tuple(pairs), dict(others))


def _computations(text: str) -> Iterator[tuple[str, dict[str, _Instruction]]]:
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
    # Operands end where the attributes begin.
    operands = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
    return _Instruction(name, shape, opcode, operands, rest)


def _multiplies(one):
    if one.opcode in _DOTS:
        return True
    target = one.text.partition('custom_call_target="')[2].partition('"')[0].lower()
    ours = target.startswith("jax_ub$")
    return not ours and any(word in target for word in _MATMUL_CALLS)


def _users(body):
    users: dict[str, list[str]] = collections.defaultdict(list)
    for one in body.values():
        for operand in one.operands:
            users[operand].append(one.name)
    return users


def _operands(body):
    return {name: one.operands for name, one in body.items()}


def _near(start, edges, body, with_dots):
    """Whether a dot is reached through what only moves or converts."""
    reached = list(edges.get(start, ()))
    for _ in range(_MAX_STEPS):
        following = []
        for name in reached:
            one = body.get(name)
            if one is None:
                continue
            called = _CALLED.search(one.text)
            if _multiplies(one) or (called and called[1] in with_dots):
                return True
            if one.opcode in _PASSED or one.opcode.endswith("-done"):
                following += edges.get(name, ())
        reached = following
    return False


def _pair(one, kind):
    num_ranks = _group_size(one.text)
    share = (num_ranks - 1) / max(num_ranks, 1)
    # The scattered result is one rank's share of what is moved.
    whole = num_ranks if kind == "reduce-scatter" else 2 if kind == "all-reduce" else 1
    named = _NAME.search(one.text)
    return Pair(
        scope=named[1] if named else one.name,
        collective=kind,
        could_be={**_GATHERS, **_REDUCTIONS}[kind],
        num_ranks=num_ranks,
        moved_bytes=round(share * whole * _size_bytes(one.shape)),
    )


def _group_size(text):
    """How many devices a collective joins; 1 where that is not said."""
    if listed := _LISTED.search(text):
        return len(listed[1].split(","))
    if iota := _IOTA.search(text):
        return int(iota[1])
    mesh = _MESH.search(text)
    if not mesh:
        return 1
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
    axes = re.findall(r"'([^']*)'", mesh[2])
    return math.prod(int(sizes.get(axis, 1)) for axis in axes)


def _size_bytes(text):
    """Of the last array of a shape: an async start lists operand and result."""
    arrays = _SHAPE.findall(text)
    if not arrays:
        return 0
    dtype, sizes = arrays[-1]
    bits = _BITS.search(dtype)
    elements = math.prod(int(size) for size in sizes.split(",") if size)
    return elements * (int(bits[0]) if bits else 8) // 8
