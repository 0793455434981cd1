"""Tests the table that `explain` returns."""

import dataclasses
import pathlib
import re

import pytest

from jax_ub._src.tools.explain.report import Row, Table

ON = Row("up", "all_gather_matmul", True, "direct", "", 3 << 20, 1.5e-3, 2e-6)
OFF = Row("down", "matmul_reduce_scatter", False, "xla", "no engine for cuda")


def test_columns_are_aligned():
    assert str(Table((ON, OFF), "mlp", ("fused: 1",))).splitlines() == [
        "mlp",
        "where  op                     overlapped  method  sends    predicted  exposed"
        "  why not",
        "-----  ---------------------  ----------  ------  -------  ---------  -------"
        "  ------------------",
        "up     all_gather_matmul      yes         direct  3.0 MiB  1.5 ms     2 us",
        "down   matmul_reduce_scatter  NO          xla                              "
        "    no engine for cuda",
        "fused: 1",
    ]


def test_table_is_overlapped_if_every_row_is():
    assert Table((ON,)).overlapped
    assert not Table((ON, OFF)).overlapped
    assert Table(()).overlapped
    assert str(Table((), "empty")) == "empty"


def test_sizes_and_times_have_units():
    texts = [
        str(Table((Row("", "", True, "", "", count, seconds),))).splitlines()[-1]
        for count, seconds in [(5, 2.0), (2048, 3e-6), (5 << 30, 2e-3)]
    ]
    assert [" ".join(text.split()[1:]) for text in texts] == [
        "5 B 2 s",
        "2.0 KiB 3 us",
        "5.0 GiB 2 ms",
    ]


def test_json_has_all_fields():
    found = Table((ON, OFF), "mlp").as_json()
    assert found["overlapped"] is False
    assert found["rows"][1]["reason"] == "no engine for cuda"
    assert found["rows"][0]["moved_bytes"] == 3 << 20


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("block/up", "block/up"),
        (f"jit(step)/{'transpose(' * 8}/shard_map/dot", ".../shard_map/dot"),
        ("n" * 99, f"{'n' * 57}..."),
    ],
)
def test_long_paths_are_shortened_in_the_table(scope, expected):
    table = Table((dataclasses.replace(ON, scope=scope),))
    assert str(table).splitlines()[-1].split()[0] == expected
    assert table.as_json()["rows"][0]["scope"] == scope


def test_the_page_names_every_key_of_a_row():
    page = pathlib.Path(__file__).parents[2] / "docs/explain.md"
    sentence = page.read_text().partition("its keys in the JSON, are ")[2]
    named = re.findall(r"`(\w+)`", sentence.partition(".\n")[0])
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Row))
