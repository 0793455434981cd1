"""Bad input of ub.all_reduce: an error that names op, argument, value and fix."""

import functools

import pytest
from refusals import refuses, zeros

import jax_ub as ub
from jax_ub.errors import ShapeContractError


def test_integers_are_not_reduced():
    refuses(
        ShapeContractError,
        "all_reduce: x is int32",
        lambda x: ub.all_reduce(x, axis_name="tp"),
        zeros(8, dtype="int32"),
    )


@pytest.mark.parametrize(
    ("addends", "text"),
    [
        ({"bias": zeros(3)}, r"bias has shape \(3,\), but here it is \[N\], \(4,\)"),
        (
            {"residual": zeros(4)},
            r"residual has shape \(4,\), but here it is the result",
        ),
        ({"bias": zeros(4, dtype="int32")}, "bias is int32"),
        ({"residual": zeros(8, 4, dtype="float8_e5m2")}, "residual is float8_e5m2"),
    ],
)
def test_addends_of_an_all_reduce_that_do_not_fit_are_named(addends, text):
    refuses(
        ShapeContractError,
        f"all_reduce: {text}",
        lambda x: ub.all_reduce(x, axis_name="tp", **addends),
        zeros(8, 4),
    )


def test_a_scalar_has_no_bias():
    # jax.vmap would make it a vector, but not its bias.
    refuses(
        ShapeContractError,
        r"all_reduce: x .*\(\)",
        lambda x: ub.all_reduce(x[0, 0], axis_name="tp", bias=zeros(8)[0]),
        zeros(8, 4),
    )


def test_fp8_is_not_all_reduced():
    call = functools.partial(ub.all_reduce, axis_name="tp")
    refuses(
        ShapeContractError,
        "all_reduce: x is float8_e4m3fn",
        call,
        zeros(8, dtype="float8_e4m3fn"),
    )
    refuses(
        ShapeContractError,
        "all_reduce: x is of type ScaledArray",
        lambda x: call(ub.quantize(x, ub.fp8.Float8CurrentScaling())),
        zeros(8, 4),
    )
