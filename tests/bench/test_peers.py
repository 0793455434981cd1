import functools

import jax
import numpy as np
import pytest
from covering import covering

from jax_ub._src import reference
from jax_ub._src.tools.bench import cases, gemm, linear, peers
from jax_ub._src.tools.bench.cases import Setup, check_agreement
from jax_ub._src.tools.bench.peers import (
    LAYOUTS,
    DotVariant,
    dot_variants,
    fastest_dot,
)
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import Ranks
from tests.operands import assert_equal, small_integers

M, K, N = 16, 8, 24


def operands(dtype="float32"):
    return small_integers(0, (M, K), dtype), small_integers(1, (K, N), dtype)


@covering(name=linear.LINEAR_OPS, num_ranks=[1, 2, 4, 8])
def test_all_programs_of_an_op_match_the_reference(name, num_ranks):
    op = linear.LINEAR_OPS[name]
    column = Shape(M, K, N)
    x, w1 = operands()
    w2, dy = small_integers(2, (N, K)), small_integers(3, (M, K))
    hidden = reference.dot(x, w1)

    def forward(x, w1, w2):
        return reference.dot(reference.dot(x, w1), w2)

    y, backward = jax.vjp(forward, x, w1, w2)
    row = reference.dot(hidden, w2)
    given, wanted = {
        "all_gather_matmul": ((x, w1), (hidden,)),
        "matmul_reduce_scatter": ((hidden, w2), (row,)),
        # The result of all ranks, one below the other.
        "matmul_all_reduce": ((hidden, w2), (np.tile(row, (num_ranks, 1)),)),
        "linear_pair": ((x, w1, w2, dy), (y, *backward(dy))),
    }[name]
    dots = {gemm: DotVariant(gemm[-2:]) for gemm in op.gemms}
    programs = [
        op.naive,
        *op.in_xla(dots, "float32").values(),
        op.on_layers(functools.partial(peers.Rings, dots, "float32", "float32")),
        op.own(),
        op.own(method="xla"),
    ]
    candidate = op.on(Ranks(num_ranks), "float32", column)
    for program in programs:
        made = candidate("any", program)
        assert [x.shape for x in made.operands] == [x.shape for x in given]
        made.operands = given
        found = made()
        found = found if isinstance(found, tuple) else (found,)
        assert_equal(tuple(found), tuple(wanted))


def gemm_operands(layout, dtype):
    left, right, _ = map(Shape(6, 4, 5).sizes, LAYOUTS[layout])
    return small_integers(0, left, dtype), small_integers(1, right, dtype)


def product(a, b, layout):
    return (a.T if layout == "tn" else a) @ (b.T if layout == "nt" else b)


@covering(dtype=["float32", "bfloat16"], layout=LAYOUTS)
def test_every_variant_of_a_dot_has_the_same_result(layout, dtype):
    a, b = gemm_operands(layout, dtype)
    wanted = product(a, b, layout).astype(dtype)
    assert wanted.shape == Shape(6, 4, 5).sizes(LAYOUTS[layout][2])
    for way in dot_variants(layout, dtype):
        assert_equal(way(a, b, dtype), wanted)


def test_the_variants_of_a_dot_differ_and_the_first_is_plain():
    ways = dot_variants("tn", "bfloat16")
    assert ways[0] == DotVariant("tn")
    assert len(set(ways)) == len(ways)


def test_gpus_have_no_variants_that_only_cpus_need():
    ways = dot_variants("nt", "bfloat16", "gpu")
    assert ways == [DotVariant("nt"), DotVariant("nt", sums_in_f32=True)]


def test_a_dot_rounds_to_the_requested_dtype():
    a, b = gemm_operands("nn", "bfloat16")
    assert DotVariant("nn")(a, b, "float32").dtype == np.float32


def test_the_fastest_dot_is_measured_once():
    found = fastest_dot("nn", "float32", (8, 16), (16, 8), Ranks(2))
    assert found in dot_variants("nn", "float32")
    measured = fastest_dot.cache_info().misses
    assert fastest_dot("nn", "float32", (8, 16), (16, 8), Ranks(2)) is found
    assert fastest_dot.cache_info().misses == measured


@pytest.mark.parametrize("layout", LAYOUTS)
def test_onednn_multiplies_and_adds(layout):
    found = peers.find_onednn("float32", layout)
    if isinstance(found, str):
        pytest.skip(found)
    left, right, out = map(Shape(3, 4, 5).sizes, LAYOUTS[layout])
    random = np.random.default_rng(0)
    a = random.integers(-3, 4, left).astype(np.float32)
    b = random.integers(-3, 4, right).astype(np.float32)
    y = np.ones(out, np.float32)
    assert found(a, b, y, 1.0) == 0
    np.testing.assert_array_equal(y, product(a, b, layout) + 1)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(peers, "_onednn", lambda: None)
    assert "oneDNN is not installed" in peers.find_onednn("float32", "nn")


def test_a_missing_gemm_is_named():
    if peers._onednn() is None:
        pytest.skip("oneDNN is not installed")
    assert "no GEMM for float16" in peers.find_onednn("float16", "nn")


@pytest.mark.parametrize("variant", ["nn+bias", "nt", "tn+add"])
def test_onednn_is_a_peer_where_it_is_installed(variant, monkeypatch):
    def find(dtype, layout):
        def gemm(a, b, y, beta):
            y[:] = product(a, b, layout) + beta * y

        return gemm

    monkeypatch.setattr(peers, "find_onednn", find)
    setup = Setup(Ranks(1), "float32", (variant,))
    (case,) = gemm.local("gemm", setup, Shape(16, 8, 24))
    assert cases.ONEDNN in [candidate.name for candidate in case.candidates]
    check_agreement(case)


def test_onednn_is_not_a_peer_on_gpus(monkeypatch):
    monkeypatch.setattr(Ranks, "platform", "gpu")
    monkeypatch.setattr(
        peers, "find_onednn", lambda dtype, layout: pytest.fail("asked for")
    )
    setup = Setup(Ranks(1), "float32", ("nn",))
    (case,) = gemm.local("gemm", setup, Shape(16, 16, 16))
    assert cases.ONEDNN not in [candidate.name for candidate in case.candidates]
    assert not case.notes
