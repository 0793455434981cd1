import pytest

from jax_ub import methods
from jax_ub.errors import UnknownNameError
from jax_ub.methods import Method


@pytest.mark.parametrize("method", Method)
def test_every_method_is_found_by_its_name(method):
    assert methods.resolve("op", method.value, None) is method
    assert methods.resolve("op", method, "xla") is method


def test_none_takes_the_default_of_the_process():
    assert methods.resolve("op", None, None) is Method.AUTO
    assert methods.resolve("op", None, "xla") is Method.XLA
    assert methods.resolve("op", "direct", "xla") is Method.DIRECT


def test_misspelt_method_names_the_nearest_one():
    message = r"op: method = 'ring-exchange' is not a method. Did you mean 'ring_exch"
    with pytest.raises(UnknownNameError, match=message):
        methods.resolve("op", "ring-exchange", None)


def test_misspelt_default_names_its_variable():
    with pytest.raises(UnknownNameError, match="JAX_UB_METHOD = 'xlaa'.*'xla'"):
        methods.resolve("op", None, "xlaa")


def test_method_of_the_wrong_type_is_refused():
    with pytest.raises(UnknownNameError, match="method = 3 is of type int, not"):
        methods.resolve("op", 3, None)


def test_record_of_fallbacks_is_bounded():
    for i in range(3000):
        methods.record_fallback(f"op {i}", "a test")
    recorded = methods.fallbacks()
    assert len(recorded) == 1024
    assert recorded[-1] == methods.Fallback("op 2999", "a test")
