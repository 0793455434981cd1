"""Finds XLA's own collectives, and the dots next to them, in optimized HLO text."""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
# Match the replica groups of a collective: listed, in iota format, or as mesh axes.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# A row of the tables of source lines in front of the computations, by table.
_TABLES = {
    "FileNames": re.compile(r'^(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"),
    "StackFrames": re.compile(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    ),
}
# Parts of the paths of libraries, whose frames are not the user's.
_LIBRARIES = (
    *("/site-packages/jax", "/site-packages/flax/"),
    f"{pathlib.Path(__file__).parents[3]}/",
)
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]+)\}")

# The function of jax_ub that could replace a collective and an adjacent dot, by the
# HLO opcode of the collective.
_COULD_BE = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
_COLLECTIVES = (*_COULD_BE, "all-to-all", "collective-permute")
# Instructions that only move or convert data, and may separate collective and dot.
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
# Instructions that change no value. A reduction after a fusion of them still sums the
# result of the dot.
_MOVES = _PASSED - {"fusion"} | {"bitcast-convert", "constant", "parameter", "tuple"}
_DOTS = ("dot", "convolution")
_MATMUL_CALLS = ("gemm", "matmul")
_MAX_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Pair:
    """A collective of XLA and an adjacent dot, which one jax_ub call could replace.

    `scope` is the collective's name stack. Each of the `num_ranks` devices of a group
    sends `moved_bytes`. `sizes` are the global M, K and N of the function `could_be`,
    or None if the HLO text does not contain them. `dtype` is that of the dot's
    operands, and `source` is the line of the user's code, or "" if it is unknown.
    """

    scope: str
    collective: str
    could_be: str
    num_ranks: int
    moved_bytes: int
    sizes: tuple[int, int, int] | None
    dtype: str
    source: str = ""

    @property
    def itemsize(self) -> int:
        return _bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Found:
    """The collectives of XLA in a compiled program, paired with dots where possible.

    `others` has the number of collectives without an adjacent dot, by opcode.
    `gathered` has the results' shapes of those all-gathers among them whose operand is
    no argument of the program.
    """

    pairs: tuple[Pair, ...]
    others: dict[str, int]
    gathered: tuple[tuple[int, ...], ...] = ()


# Dtype, such as "bf16", and dimensions of an array.
_Array = tuple[str, list[int]]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    arrays: list[_Array]  # the arrays of the result, which may be a tuple
    opcode: str
    operands: list[str]
    text: str


@dataclasses.dataclass(frozen=True)
class _Dot:
    """The numbers of elements of one rank's operands and result, and K."""

    lhs: int
    rhs: int
    out: int
    contracting: int
    dtype: str


def collectives(text: str) -> Found:
    """Finds XLA's collectives, and the dots next to them, in optimized HLO text.

    An all-gather is paired with the nearest dot that uses its result, a reduction with
    the nearest dot whose result it sums.
    """
    computations = dict(_computations(text))
    lines = _SourceLines(text)
    # The first dot of each computation that contains one.
    dots = {
        name: _dot(one, body)
        for name, body in computations.items()
        for one in reversed(body.values())
        if _multiplies(one)
    }
    impure = {
        name
        for name, body in computations.items()
        if not all(one.opcode in _MOVES or _multiplies(one) for one in body.values())
    }
    pairs = []
    gathered: list[tuple[int, ...]] = []
    others: collections.Counter[str] = collections.Counter()
    for body in computations.values():
        operands = {one.name: one.operands for one in body.values()}
        users: dict[str, list[str]] = collections.defaultdict(list)
        for name, used in operands.items():
            for operand in used:
                users[operand].append(name)
        for one in body.values():
            kind = one.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            near = None
            if kind == "all-gather":
                near = _near(one.name, users, body, dots)
            elif kind in _COULD_BE and _sums(one, computations):
                near = _near(one.name, operands, body, dots, impure)
            if near is not None:
                pairs.append(_pair(one, kind, near, lines))
                continue
            others[kind] += 1
            if kind == "all-gather" and not _gathers_argument(one, body):
                gathered.append(tuple(one.arrays[-1][1]))
    return Found(tuple(pairs), dict(others), tuple(gathered))


class _SourceLines:
    """Finds source lines of the user in the tables at the beginning of HLO text."""

    def __init__(self, text: str):
        # The columns of each row, by table and id.
        self._rows: dict[str, dict[int, tuple[str, ...]]] = {n: {} for n in _TABLES}
        table = ""
        for line in text.splitlines():
            if line.isalpha():
                table = line
            elif table in _TABLES and (row := _TABLES[table].match(line)):
                self._rows[table][int(row[1])] = row.groups()[1:]
            elif line.endswith("{"):
                break
        frames = self._rows["StackFrames"]
        # XLA may print the parent's id plus 1: the first frame, without parent, has 1.
        self._offset = 1 if frames.get(1, ("", ""))[1] == "1" else 0

    def of(self, one: "_Instruction") -> str:
        """Returns the source line of an instruction, such as "train.py:12", or ""."""
        if named := _SOURCE.search(one.text):
            return f"{named[1]}:{named[2]}"
        found = _FRAME.search(one.text)
        frame = int(found[1]) if found else 0
        lines = []
        while frame in self._rows["StackFrames"]:
            location, parent = self._rows["StackFrames"][frame]
            file, line = self._rows["FileLocations"].get(int(location), ("0", ""))
            (path,) = self._rows["FileNames"].get(int(file), ("",))
            lines.append(f"{path}:{line}" if path else "")
            # A caller has a lower id. If a text has it wrong, `min` ends the loop.
            frame = min(int(parent or 0) - self._offset, frame - 1)
        own = (line for line in lines if not any(one in line for one in _LIBRARIES))
        return next(own, lines[0] if lines else "")


def _sums(one, computations):
    """Returns whether a reduction adds, or its kind is unknown."""
    called = _CALLED.search(one.text)
    body = computations.get(called[1], {}) if called else {}
    return {each.opcode for each in body.values()} <= {"parameter", "add", "convert"}


def _gathers_argument(one, body):
    """Returns whether only moves, such as transposes, precede a collective."""
    for _ in range(_MAX_STEPS):
        found = body.get(one.operands[0]) if one.operands else None
        if found is None or found.opcode == "parameter":
            return True
        if found.opcode not in _MOVES:
            return False
        one = found
    return False


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
    arrays = [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in _SHAPE.findall(shape)
    ]
    # The operand list ends where the attributes start.
    operands = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
    return _Instruction(name, arrays, opcode, operands, rest)


def _bits(dtype):
    found = _BITS.search(dtype)
    return int(found[0]) if found else 8


def _multiplies(one):
    if one.opcode in _DOTS:
        return True
    target = one.text.partition('custom_call_target="')[2].partition('"')[0].lower()
    is_jax_ub = target.startswith("jax_ub$")
    return not is_jax_ub and any(word in target for word in _MATMUL_CALLS)


def _dot(one, body):
    """Returns the sizes of a dot; sizes that the text does not contain are 0."""
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
    return _Dot(lhs, rhs, out, K, dtype)


def _near(start, edges, body, dots, impure=frozenset()):
    """Returns the nearest dot along `edges` (users or operands) from `start`, or None.

    Only instructions in `_PASSED` may be between them, and no fusions that call
    computations in `impure`.
    """
    reached = list(edges.get(start, ()))
    for _ in range(_MAX_STEPS):
        following = []
        for name in reached:
            one = body.get(name)
            if one is None:
                continue
            called = _CALLED.search(one.text)
            if _multiplies(one):
                return _dot(one, body)
            if called and called[1] in impure:
                continue
            if called and called[1] in dots:
                return dots[called[1]]
            if one.opcode in _PASSED or one.opcode.endswith("-done"):
                following += edges.get(name, ())
        reached = following
    return None


def _pair(one, kind, dot, lines):
    num_ranks = _group_size(one.text)
    share = (num_ranks - 1) / max(num_ranks, 1)
    # A reduce-scatter's result is 1 / num_ranks of the reduced array.
    whole = num_ranks if kind == "reduce-scatter" else 2 if kind == "all-reduce" else 1
    named = _NAME.search(one.text)
    # An asynchronous start lists its operand before its result.
    dtype, sizes = one.arrays[-1]
    return Pair(
        scope=named[1] if named else one.name,
        collective=kind,
        could_be=_COULD_BE[kind],
        num_ranks=num_ranks,
        moved_bytes=round(share * whole * (math.prod(sizes) * _bits(dtype) // 8)),
        sizes=_global_sizes(one, kind, dot, num_ranks),
        dtype=dot.dtype,
        source=lines.of(one),
    )


def _global_sizes(one, kind, dot, num_ranks):
    K = dot.contracting
    if min(dot.lhs, dot.rhs, dot.out, K) < 1:
        return None
    if kind != "all-gather":
        M = max(dot.lhs // K, 1)
        return M, num_ranks * K, max(dot.out // M, 1)
    # M is the number of rows of the gathered operand, which may be the left or the
    # right operand of the dot.
    gathered = math.prod(one.arrays[-1][1])
    M = max((dot.rhs if gathered == dot.rhs else dot.lhs) // K, 1)
    return M, K, num_ranks * max(dot.out // M, 1)


def _group_size(text):
    """Returns the number of devices in a collective's replica group; 1 if unknown."""
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
