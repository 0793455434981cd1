"""Tests finding XLA's collectives, and adjacent dots, in compiled text."""

import pytest

from jax_ub._src.tools.explain import hlo
from jax_ub._src.tools.explain.hlo import Pair

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
GROUPS = {
    "listed": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "iota": "replica_groups=[2,4]<=[8]",
    "mesh": "replica_groups=mesh['dp'=2,'tp'=4] {'tp'}",
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_pairs_are_found_through_converts_and_transposes(groups):
    found = hlo.collectives(TEXT.replace("GROUPS", groups))
    assert found.pairs == (
        Pair(
            *("jit(step)/up/all_gather", "all-gather", "all_gather_matmul", 4, 48),
            sizes=(8, 4, 4 * 6),
            dtype="f32",
        ),
        Pair("r", "all-reduce", "matmul_all_reduce", 4, 192, (8, 4 * 6, 4), "f32"),
        Pair(
            *("s", "reduce-scatter", "matmul_reduce_scatter", 4, 96, (8, 4 * 6, 4)),
            dtype="f32",
        ),
    )
    assert {pair.itemsize for pair in found.pairs} == {4}
    assert found.others == {"all-to-all": 1, "all-reduce": 1}


def test_collective_with_unknown_groups_moves_no_bytes():
    found = hlo.collectives(TEXT.replace(", GROUPS", ""))
    assert {(pair.num_ranks, pair.moved_bytes) for pair in found.pairs} == {(1, 0)}


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
    [pair] = hlo.collectives(text).pairs
    assert pair.sizes == expected


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
        ('source_file="/a.py" source_line=7', "/a.py:7"),
        ("stack_frame_id=1", "/home/me/train.py:13"),
        ("stack_frame_id=2", "/home/me/train.py:13"),
        ("stack_frame_id=3", ""),
    ],
)
def test_source_is_the_line_of_the_user(metadata, source):
    named = f'metadata={{op_name="jit(step)/up/all_gather" {metadata}}}'
    text = TEXT.replace('metadata={op_name="jit(step)/up/all_gather"}', named)
    assert hlo.collectives(FRAMES + text).pairs[0].source == source


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
    assert hlo.collectives(text) == hlo.Found((), {"all-reduce": 1})
    pure = text.replace(reduction, "add").replace(operation, "copy")
    assert len(hlo.collectives(pure).pairs) == 1


def test_program_without_collectives_has_no_pairs():
    assert hlo.collectives("") == hlo.Found((), {})
