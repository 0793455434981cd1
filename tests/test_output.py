"""The tables, units and files of reports and commands."""

import pathlib

import pytest

from jax_ub._src.output import (
    format_bytes,
    format_count,
    format_row,
    format_seconds,
    format_table,
    write_json,
)
from jax_ub.errors import OutputError


def test_columns_are_as_wide_as_their_longest_cell():
    rows = [("matmul", 7, ""), ("x", 1000, "")]
    assert format_table(("op", "us", "note"), rows, right=[1], has_rule=True) == [
        "op        us  note",
        "------  ----  ----",
        "matmul     7",
        "x       1000",
    ]


def test_a_table_without_titles_has_only_its_rows():
    assert format_table((), [("ok", "jax"), ("FAIL", "x")], right=[0]) == [
        "  ok  jax",
        "FAIL  x",
    ]
    assert format_table((), []) == []


def test_markdown_tables_have_a_rule_and_bars():
    assert format_table(("a", "bc"), [("def", 1)], is_markdown=True) == [
        "| a   | bc |",
        "|-----|----|",
        "| def | 1  |",
    ]


def test_rows_of_fixed_widths_can_be_printed_one_by_one():
    assert format_row(("a", 1.5), (3, 5), right=[1]) == "a      1.5"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 << 10, "1023.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 20, "3.0 MiB"),
    ],
)
def test_bytes_have_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
    assert format_bytes(num_bytes << 30).endswith("GiB") == (num_bytes > 0)


def test_seconds_have_three_digits():
    found = [format_seconds(s) for s in (0.0, 1.2345e-6, 0.0125, 61.7)]
    assert found == ["0 us", "1.23 us", "12.5 ms", "61.7 s"]
    found = [format_seconds(s) for s in (9.994e-4, 9.996e-4, 0.9994, 0.9996)]
    assert found == ["999 us", "1 ms", "999 ms", "1 s"]


def test_counts_have_decimal_prefixes():
    assert format_count(1.234e9) == "1.23 G"
    assert format_count(2e12, "FLOP") == "2 TFLOP"
    assert [format_count(950), format_count(5, "B")] == ["950", "5 B"]
    assert [format_count(c) for c in (9.994e8, 9.996e8)] == ["999 M", "1 G"]
    assert [format_count(c, "FLOP") for c in (2e15, 3e18)] == ["2 PFLOP", "3 EFLOP"]


def test_full_disk_is_an_error_that_names_the_file():
    with pytest.raises(OutputError, match="cannot write '/dev/full': No space left"):
        write_json(pathlib.Path("/dev/full"), {})
