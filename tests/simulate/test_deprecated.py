"""Predictions by `jax_ub.simulate`, the deprecated module."""

import importlib
import warnings

import pytest

from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.prediction.hardware import HARDWARE
from jax_ub.errors import ShapeContractError, UnknownNameError

SIZES = {"M": 8192, "K": 8192, "N": 10240, "P": 8, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def simulate():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax_ub.simulate")


def test_methods_and_machines_may_be_names_or_objects(simulate):
    op, h100 = "all_gather_matmul", HARDWARE["h100"]
    choice = MethodChoice(Method.PIPELINE)
    expected = estimate(op, choice, **SIZES, machine=h100)
    for method in ("pipeline", Method.PIPELINE, choice):
        for hardware in ("h100", h100):
            found = simulate.estimate(op, method, **SIZES, hardware=hardware)
            assert found == expected
            seconds = simulate.predict(op, method, **SIZES, hardware=hardware)
            assert seconds == expected.seconds
    h200 = estimate(op, choice, **SIZES, machine=HARDWARE["h200"])
    assert simulate.estimate(op, choice, **SIZES) == h200


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"op": "all_gather_matmull"}, UnknownNameError, "Did you mean 'all_gather_m"),
        ({"method": "rings"}, UnknownNameError, "method = 'rings' is not a method"),
        ({"hardware": "h1000"}, UnknownNameError, "hardware 'h1000' is not known. Did"),
        ({"M": 0}, ShapeContractError, "M = 0, K = 8192, N = 10240 on P = 8 ranks"),
    ],
)
def test_invalid_arguments_are_rejected(simulate, changed, error, text):
    arguments = {"op": "matmul", "method": "auto", **SIZES, **changed}
    with pytest.raises(error, match=text):
        simulate.predict(**arguments)
