"""Parses HLO text: instructions, their source lines, and the devices they connect."""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]+)\}")
# Opcodes of instructions that may be between a collective and the dot that is paired
# with it, because they only move or convert data. Only a fusion may also compute.
PASSED = {
    *("bitcast", "convert", "copy", "fusion"),
    *("get-tuple-element", "reshape", "transpose"),
}
_DOTS = ("dot", "convolution")
_MATMUL_CALLS = ("gemm", "matmul")
MAX_STEPS = 4
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# Maps the name of a table to a pattern that matches a row of the table. HLO text begins
# with these tables, which give the file, line and parent of each stack frame.
_TABLES = {
    "FileNames": re.compile(r'(\d+) "(.*)"'),
    "FileLocations": re.compile(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"),
    "StackFrames": re.compile(
        r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    ),
}
# A stack frame belongs to a library, and not to the user's program, if its file path
# contains one of these texts.
_LIBRARIES = (
    *("/site-packages/jax", "/site-packages/flax/"),
    f"{pathlib.Path(__file__).parents[3]}/",
)
# Patterns for the device groups of a collective in the three formats of HLO: a list,
# iota format, and mesh axes.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))? ?\{([^}]*)\}"
)
# Matches the device ids of a mesh in iota format, such as "[2,4]T(1,0)". HLO text
# contains the ids if the devices are not in the order of their ids.
_DEVICE_IDS = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")

# An array in HLO text: its dtype, such as "bf16", and its dimensions.
Array = tuple[str, list[int]]


@dataclasses.dataclass(eq=False)
class Instruction:
    name: str
    arrays: list[Array]  # the arrays of the result, which may be a tuple
    opcode: str
    operands: list["Instruction"]
    text: str
    users: list["Instruction"] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> str:
        """Returns the opcode without suffix: "all-gather" for "all-gather-start"."""
        return self.opcode.removesuffix("-start")

    @property
    def called(self) -> str:
        """Returns the name of the computation that the instruction calls, or ""."""
        return _first_group(_CALLED, self.text)

    @property
    def op_name(self) -> str:
        """Returns the JAX name stack, such as "jit(f)/mlp/dot_general", or ""."""
        return _first_group(_OP_NAME, self.text)

    @property
    def stack_frame(self) -> int:
        return int(_first_group(_FRAME, self.text) or 0)

    @property
    def is_in_backward_pass(self) -> bool:
        return "transpose(" in self.op_name

    @property
    def is_call(self) -> bool:
        """Returns whether the instruction is a custom call of jax_ub."""
        return 'custom_call_target="jax_ub$' in self.text

    @property
    def passes(self) -> bool:
        return self.opcode in PASSED or self.opcode.endswith("-done")


@dataclasses.dataclass(frozen=True)
class Dot:
    """The sizes of a dot: elements of the operands and the result, and contracted size.

    `operands` are the operands of the dot, or of the fusion that contains it.
    """

    instruction: Instruction
    operands: list[Instruction]
    lhs: int
    rhs: int
    out: int
    contracting: int
    dtype: str


def users_by_array(one: Instruction) -> list[list[Instruction]]:
    """Returns the instructions that use each result array of a collective."""
    if len(one.arrays) == 1:
        return [one.users]
    found: list[list[Instruction]] = [[] for _ in one.arrays]
    for source in (one, *one.users):  # the second may be its "-done"
        for user in source.users:
            index = _first_group(_INDEX, user.text)
            if user.opcode == "get-tuple-element" and index:
                found[int(index)].append(user)
    return found


def around(
    reached: Sequence[Instruction],
    neighbors: Callable[[Instruction], list[Instruction]],
    blocking: Collection[str] = (),
) -> Iterator[Instruction]:
    """Yields the instructions `reached` and instructions near them, the nearest first.

    A step is from an instruction to one of its `neighbors`, its users or operands. Only
    instructions in `PASSED` may be in between, and no fusions that call computations in
    `blocking`.
    """
    for _ in range(MAX_STEPS):
        yield from reached
        passed = [one for one in reached if one.passes and one.called not in blocking]
        reached = [near for one in passed for near in neighbors(one)]


def _first_group(pattern, text) -> str:
    """Returns the first group of the first match of a pattern in a text, or ""."""
    found = pattern.search(text)
    return found[1] if found else ""


def computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Parses HLO text; returns {computation name: {instruction name: instruction}}."""
    found: dict[str, dict[str, Instruction]] = {}
    known: dict[str, Instruction] = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            known[match[1]] = _instruction(known, *match.groups())
        elif head := _COMPUTATION.match(line):
            known = found[head[1]] = {}
    return found


def _instruction(known, name, shape, opcode, rest):
    """Parses an instruction, and adds it to the `users` of each of its operands.

    An operand that is not among the `known` instructions of the computation counts as a
    parameter without a shape.
    """
    arrays = [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in _SHAPE.findall(shape)
    ]
    # "), " separates the operand list of an instruction from its attributes.
    names = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        # The tuple that an asynchronous start returns has its operands before its
        # results.
        arrays = arrays[len(names) : 2 * len(names)]
    unknown = Instruction("", [], "parameter", [], "")
    operands = [known.get(operand, unknown) for operand in names]
    one = Instruction(name, arrays, opcode, operands, rest)
    for operand in operands:
        operand.users.append(one)
    return one


def bits(dtype: str) -> int:
    """Returns the bits per element of an HLO dtype: 16 for "bf16", 8 for "pred"."""
    return int(_first_group(_BITS, dtype) or 8)


def multiplies(one: Instruction) -> bool:
    """Returns whether an instruction is a dot, or calls a library's GEMM."""
    if one.opcode in _DOTS:
        return True
    target = _first_group(_TARGET, one.text).lower()
    return not one.is_call and any(word in target for word in _MATMUL_CALLS)


def dot_of(one: Instruction) -> Dot:
    """Returns the sizes of a dot. Operands without a shape have size 0."""
    operands = [operand.arrays for operand in one.operands[:2]]
    # A library call may return its workspace as a second array, so only the first array
    # of each operand and of the result counts.
    first = [arrays[0] if arrays else ("", [0]) for arrays in (*operands, [], [])]
    (dtype, sizes), (_, right) = first[:2]
    lhs, rhs, out = (math.prod(each) for each in (sizes, right, one.arrays[0][1]))
    contracting = _first_group(_CONTRACTING, one.text)
    if contracting and lhs:
        K = math.prod(sizes[int(axis)] for axis in contracting.split(","))
    else:
        # K follows from the sizes of operands and result: (M K) (K N) / (M N) = K^2.
        K = math.isqrt(lhs * rhs // max(out, 1))
    return Dot(one, one.operands, lhs, rhs, out, K, dtype)


def source_lines(text: str) -> dict[int, str]:
    """Returns {stack frame: line of the user's code}, such as {1: "train.py:12"}.

    The tables at the beginning of HLO text have the frames. A frame without a line of
    the user has its line in a library, or "".
    """
    rows: dict[str, dict[int, tuple[str, ...]]] = {}  # by table and id
    for name, pattern in _TABLES.items():
        table = text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
        rows[name] = {int(row[0]): row[1:] for row in pattern.findall(table)}
    frames = rows["StackFrames"]
    # Frame 1 has no parent, so its parent id should be 0. XLA may print all parent ids
    # 1 too high. This is the case if the parent id of frame 1 is 1.
    offset = 1 if frames.get(1, ("", ""))[1] == "1" else 0
    lines: dict[int, str] = {}
    of_user: dict[int, str] = {}
    # The parent of a frame is its caller. A parent has a lower id, so it comes first.
    for frame, (location, parent) in sorted(frames.items()):
        file, line = rows["FileLocations"].get(int(location), ("0", ""))
        (path,) = rows["FileNames"].get(int(file), ("",))
        own = f"{path}:{line}" if path else ""
        caller = int(parent or 0) - offset
        if not any(each in own for each in _LIBRARIES):
            of_user[frame] = own
        elif caller in of_user:
            of_user[frame] = of_user[caller]
        lines[frame] = of_user.get(frame, own)
    return lines


def named_mesh_in(text: str) -> dict[str, int]:
    """Returns {mesh axis: size} from HLO text, or {} if the text has no axis names.

    XLA may make up names of axes, such as "axis_0". Such meshes are ignored.
    """
    for found in _MESH.finditer(text):
        sizes = _sizes(found[1])
        if not any(name.startswith("axis_") for name in sizes):
            return sizes
    return {}


def group_size_and_axes(
    text: str, mesh: Mapping[str, int]
) -> tuple[int, tuple[str, ...]]:
    """Returns the size of a collective's device groups and the mesh axes they span.

    The number is 1, and the axes are empty, if they are unknown.
    """
    groups = _device_groups(text)
    if not groups:
        return 1, ()
    names = [name for name, size in mesh.items() if size > 1]
    for num_axes in range(1, len(names) + 1):
        for axes in itertools.combinations(names, num_axes):
            along = [set(group) for group in _groups_along(mesh, axes)]
            if all(any(whole.issuperset(one) for whole in along) for one in groups):
                return len(groups[0]), axes
    return len(groups[0]), ()


def communicates(text: str) -> bool:
    """Returns whether a collective sends data. False if each group has one device."""
    groups = _device_groups(text)
    return not groups or any(len(set(group)) > 1 for group in groups)


def _sizes(text):
    return {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", text)}


def _device_groups(text) -> list[list[int]]:
    """Returns the device groups in the HLO text of a collective, or [] without groups.

    For example, `replica_groups={{0,1},{2,3}}` gives [[0, 1], [2, 3]]. Each group of a
    collective-permute is the source and the target of one transfer.
    """
    if listed := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return [[int(number) for number in group.split(",")] for group in groups]
    if iota := _IOTA.search(text):
        return _iota(iota[2], iota[3]).reshape(-1, int(iota[1])).tolist()
    if found := _MESH.search(text):
        along = _groups_along(_sizes(found[1]), re.findall(r"'([^']*)'", found[3]))
        if found[2] is None:
            return along
        if iota := _DEVICE_IDS.fullmatch(found[2]):
            return _iota(*iota.groups()).reshape(-1)[along].tolist()
    return []


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Returns the device numbers in iota format: a range, reshaped and transposed.

    For example, "2,2" and "1,0" give [[0, 2], [1, 3]].
    """
    dims = [int(size) for size in sizes.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else None
    return np.arange(math.prod(dims)).reshape(dims).transpose(axes)


def _groups_along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Returns groups of device numbers. Devices of a group differ only along `axes`."""
    along = [list(mesh).index(name) for name in axes if name in mesh]
    numbers = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
    size = math.prod(numbers.shape[axis] for axis in along)
    last = np.moveaxis(numbers, along, range(-len(along), 0))
    return last.reshape(-1, size).tolist()
