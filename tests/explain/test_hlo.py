"""Tests finding XLA's collectives, and adjacent dots, in compiled text."""

import pytest

from jax_ub._src.tools.explain import hlo
from jax_ub._src.tools.explain.hlo import Collective
from jax_ub._src.tools.explain.instructions import group_size_and_axes, named_mesh_in

TEXT = """HloModule jit_step, is_scheduled=true

%multiply_it (param_0: f32[8,4], param_1: f32[4,6]) -> f32[8,6] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[4,6]{1,0} parameter(1)
  ROOT %dot.9 = f32[8,6]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}

ENTRY %main (x: bf16[2,4], w: f32[4,6], v: f32[6,4]) -> f32[8,4] {
  %x = bf16[2,4]{1,0} parameter(0)
  %w = f32[4,6]{1,0} parameter(1)
  %v = f32[6,4]{1,0} parameter(2)
  %gather = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), GROUPS, \
metadata={op_name="jit(step)/up/all_gather"}
  %gathered = bf16[8,4]{1,0} all-gather-done(%gather)
  %wide = f32[8,4]{1,0} convert(%gathered)
  %h = f32[8,6]{1,0} fusion(%wide, %w), kind=kOutput, calls=%multiply_it
  %moved = f32[8,6]{1,0} all-to-all(%h), GROUPS, dimensions={0}
  %y = f32[8,4]{1,0} custom-call(%moved, %v), custom_call_target="__cublas$gemm"
  %r = f32[8,4]{1,0} all-reduce(%y), GROUPS, to_apply=%sum
  %s = f32[2,4]{1,0} reduce-scatter(%y), GROUPS, to_apply=%sum
  %sum.1 = f32[2,4]{1,0} custom-call(%s), custom_call_target="jax_ub$matmul"
  ROOT %last = f32[2,4]{1,0} all-reduce(%sum.1), GROUPS, to_apply=%sum
}
"""


def collectives(text, mesh=None):
    return list(hlo.collectives(text, mesh))


def with_dots(found):
    return [one for one in found if one.could_be]


def without_dots(found):
    return [one.kind for one in found if not one.could_be]


MESH = {"dp": 2, "tp": 4}
GROUPS = {
    "listed": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "iota": "replica_groups=[2,4]<=[8]",
    "mesh": "replica_groups=mesh['dp'=2,'tp'=4] {'tp'}",
}


@pytest.mark.parametrize("text", GROUPS.values(), ids=GROUPS)
def test_pairs_are_found_through_converts_and_transposes(text):
    found = collectives(TEXT.replace("GROUPS", text), MESH)
    assert with_dots(found) == [
        Collective(
            *("jit(step)/up/all_gather", "all-gather", 4, 48, "f32"),
            axes=("tp",),
            could_be="all_gather_matmul",
            sizes=(8, 4, 4 * 6),
        ),
        Collective(
            *("r", "all-reduce", 4, 192, "f32"),
            axes=("tp",),
            could_be="matmul_all_reduce",
            sizes=(8, 4 * 6, 4),
        ),
        Collective(
            *("s", "reduce-scatter", 4, 96, "f32"),
            axes=("tp",),
            could_be="matmul_reduce_scatter",
            sizes=(8, 4 * 6, 4),
        ),
    ]
    assert {pair.itemsize for pair in with_dots(found)} == {4}
    assert without_dots(found) == ["all-to-all", "all-reduce"]


def test_collective_with_unknown_groups_moves_no_bytes():
    found = collectives(TEXT.replace(", GROUPS", ""))
    assert {(one.num_ranks, one.moved_bytes) for one in found} == {(1, 0)}


DOTS = {
    "left": ("f32[8,6] dot(%g, %w), lhs_contracting_dims={1}", (8, 4, 4 * 6)),
    "right": ("f32[6,8] dot(%w, %g), lhs_contracting_dims={0}", (8, 4, 4 * 6)),
    "transposed": ("f32[4,6] dot(%g, %dy), lhs_contracting_dims={0}", (4, 8, 4 * 6)),
    "batch": ("f32[2,4,6] dot(%b, %v), lhs_contracting_dims={2}", (8, 4, 4 * 6)),
    "library's": ("(f32[8,6], s8[99]) custom-call(%g, %w)", (8, 4, 4 * 6)),
    "vector": ("f32[8] dot(%g, %one), lhs_contracting_dims={1}", (8, 4, 4)),
    "not said": ("f32[8,6] custom-call(%g)", None),
}


@pytest.mark.parametrize(("dot", "expected"), DOTS.values(), ids=DOTS)
def test_sizes_are_global(dot, expected):
    text = f"""ENTRY %main (x: f32[2,4], w: f32[4,6], dy: f32[8,6]) -> f32[8,6] {{
  %x = f32[2,4] parameter(0)
  %w = f32[4,6] parameter(1)
  %dy = f32[8,6] parameter(2)
  %v = f32[2,4,6] parameter(3)
  %one = f32[4] parameter(4)
  %g = f32[8,4] all-gather(%x), replica_groups=[1,4]<=[4]
  %b = f32[2,4,4] reshape(%g)
  ROOT %y = {dot}, custom_call_target="a_gemm"
}}
"""
    [pair] = with_dots(collectives(text))
    assert pair.sizes == expected
    # The gathered array is an argument of the program.
    assert pair.is_of_kernel is dot.startswith("f32[6,8] dot(%w, %g)")


FRAMES = """
FileNames
1 "/home/me/train.py"
2 "/venv/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "<module>"
2 "Linear.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=13 end_line=13 column=4 end_column=4}
2 {file_name_id=2 function_name_id=2 line=422 end_line=422 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("", ""),
        ("stack_frame_id=1", "/home/me/train.py:13"),
        ("stack_frame_id=2", "/home/me/train.py:13"),
        ("stack_frame_id=3", ""),
    ],
)
def test_source_is_the_line_of_the_user(metadata, source):
    named = f'metadata={{op_name="jit(step)/up/all_gather" {metadata}}}'
    text = TEXT.replace('metadata={op_name="jit(step)/up/all_gather"}', named)
    assert collectives(FRAMES + text)[0].source == source


@pytest.mark.parametrize(
    ("reduction", "operation"),
    [("maximum", "copy"), ("add", "exponential"), ("minimum", "exponential")],
)
def test_a_reduction_of_another_value_is_not_a_pair(reduction, operation):
    text = f"""%reduced (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] {reduction}(%a, %b)
}}

%changed (p: f32[8,6]) -> f32[8,6] {{
  %p = f32[8,6] parameter(0)
  ROOT %q = f32[8,6] {operation}(%p)
}}

ENTRY %main (x: f32[8,4], w: f32[4,6]) -> f32[8,6] {{
  %x = f32[8,4] parameter(0)
  %w = f32[4,6] parameter(1)
  %y = f32[8,6] dot(%x, %w), lhs_contracting_dims={{1}}
  %z = f32[8,6] fusion(%y), kind=kLoop, calls=%changed
  ROOT %r = f32[8,6] all-reduce(%z), replica_groups=[1,4]<=[4], to_apply=%reduced
}}
"""
    assert without_dots(collectives(text)) == ["all-reduce"]
    pure = text.replace(reduction, "add").replace(operation, "copy")
    assert len(with_dots(collectives(pure))) == 1


def _tuple(texts):
    """Joins the elements of a tuple like XLA, which numbers every fifth one."""
    numbered = (f"/*index={i}*/{text}" if i == 5 else text for i, text in texts)
    return ", ".join(numbered)


@pytest.mark.parametrize("num_arrays", [2, 7])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_each_array_of_a_combined_collective_is_a_pair(kind, num_arrays):
    sizes = [2 * (i + 1) for i in range(num_arrays)]
    lines = ["ENTRY %main (w: f32[4,6]) -> f32[] {", "  %w = f32[4,6] parameter(0)"]
    lines += [f"  %p{i} = f32[{m},4] parameter({i})" for i, m in enumerate(sizes)]
    dots = [
        f"  %y{i} = f32[{m},6] dot(%{{}}{i}, %w), lhs_contracting_dims={{1}}, "
        f'metadata={{op_name="layer{i}/dot"}}'
        for i, m in enumerate(sizes)
    ]
    dots = [dot.replace("{}", "p" if kind == "all-reduce" else "g") for dot in dots]
    attributes = (
        'replica_groups=[1,2]<=[2], metadata={op_name="(layer0/dot:layer1/dot)"}'
    )
    if kind == "all-reduce":
        arrays = _tuple(enumerate(f"f32[{m},6]" for m in sizes))
        summed = _tuple((i, f"%y{i}") for i in range(num_arrays))
        lines += [*dots, f"  ROOT %r = ({arrays}) all-reduce({summed}), {attributes}"]
    else:
        parts = _tuple(enumerate(f"f32[{m // 2},4]" for m in sizes))
        arrays = _tuple(enumerate(f"f32[{m},4]" for m in sizes))
        given = _tuple((i, f"%p{i}") for i in range(num_arrays))
        start = f"(({parts}), ({arrays})) all-gather-start({given}), {attributes}"
        lines += [f"  %s = {start}", f"  %done = ({arrays}) all-gather-done(%s)"]
        lines += [
            f"  %g{i} = f32[{m},4] get-tuple-element(%done), index={i}"
            for i, m in enumerate(sizes)
        ]
        lines += dots
    pairs = with_dots(collectives("\n".join([*lines, "}"])))
    assert [pair.scope for pair in pairs] == [
        f"layer{i}/dot" for i in range(num_arrays)
    ]
    assert {pair.num_combined for pair in pairs} == {num_arrays}
    elements = [6 * m if kind == "all-reduce" else 4 * m // 2 for m in sizes]
    assert [pair.moved_bytes for pair in pairs] == [4 * number for number in elements]
    assert [pair.sizes[0] for pair in pairs] == sizes


@pytest.mark.parametrize("is_argument", [False, True])
def test_arrays_that_are_combined_with_a_pair_are_unpaired(is_argument):
    bias = "parameter(2)" if is_argument else "exponential(%b)"
    text = f"""ENTRY %main (x: f32[8,4], w: f32[1,6], b: f32[3]) -> f32[8,6] {{
  %x = f32[8,4] parameter(0)
  %w = f32[1,6] parameter(1)
  %c = f32[3] {bias}
  %g = (f32[4,6], f32[12]) all-gather(%w, %c), {GROUPS["mesh"]}
  %v = f32[4,6] get-tuple-element(%g), index=0
  %d = f32[12] get-tuple-element(%g), index=1, metadata={{op_name="step/bias"}}
  %e = f32[12] exponential(%d)
  ROOT %y = f32[8,6] dot(%x, %v), lhs_contracting_dims={{1}}
}}
"""
    pair, bias = collectives(text)
    assert (pair.could_be, pair.is_of_kernel) == ("all_gather_matmul", True)
    assert bias == Collective(
        *("step/bias", "all-gather", 4, 3 * 3 * 4, "f32"),
        axes=("tp",),
        num_combined=2,
        is_of_kernel=is_argument,
    )


PERMUTE = "source_target_pairs={{0,4},{4,0},{1,5},{5,1}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (2, ("dp",))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (2, ("dp",))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (2, ("dp",))),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_1'}",
            (2, ("dp",)),
        ),
        ("replica_groups=mesh['a'=8], device_ids=(0,2,1) {'a'}", (1, ())),
        (PERMUTE, (2, ("dp",))),
        ("replica_groups=[1,8]<=[8]", (8, ("dp", "tp"))),
        ("replica_groups={{0,5},{1,4},{2,7},{3,6}}", (2, ("dp", "tp"))),
        ("replica_groups={}", (1, ())),
    ],
)
def test_mesh_axes_are_found_from_devices(text, expected):
    assert group_size_and_axes(text, MESH) == expected


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "replica_groups=[8,1]<=[8]",
        "replica_groups=mesh['dp'=1,'tp'=8] {'dp'}",
    ],
)
def test_collectives_of_single_devices_are_ignored(groups):
    assert not collectives(TEXT.replace("GROUPS", groups), {"dp": 1, "tp": 8})


def test_unknown_mesh_leaves_the_axes_unknown():
    assert named_mesh_in("replica_groups=mesh['axis_0'=8] {'axis_0'}") == {}
    assert named_mesh_in(GROUPS["mesh"]) == MESH
    assert group_size_and_axes("replica_groups=[1,8]<=[8]", {}) == (8, ())
    assert group_size_and_axes("replica_groups=[1,8]<=[8]", {"tp": 2}) == (8, ())


@pytest.mark.parametrize("primitive", ["reshard", "all_to_all"])
def test_all_to_all_is_a_reshard_if_the_program_does_not_contain_it(primitive):
    text = f"""ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4] parameter(0)
  %moved = f32[8,4] all-to-all(%x), GROUPS, metadata={{op_name="f/{primitive}"}}
  %y = f32[8,4] bitcast(%moved)
  ROOT %z = f32[8,4] custom-call(%y), custom_call_target="jax_ub$all_gather_matmul", \
backend_config={{label = "all_gather_matmul (ub_name 'up')", method = 0 : i64}}
}}
"""
    (found,) = collectives(text.replace("GROUPS", GROUPS["mesh"]))
    is_reshard = primitive == "reshard"
    scope = "up" if is_reshard else f"f/{primitive}"
    expected = (scope, "all-to-all", 4, 96, "f32")
    assert found == Collective(*expected, axes=("tp",), is_reshard=is_reshard)


def test_program_without_collectives_has_no_pairs():
    assert not collectives("")
