import re

import jax
import jax.numpy as jnp
import pytest

from jax_ub._src import methods
from jax_ub._src.methods import Method
from jax_ub.errors import UnknownNameError


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


def test_record_of_fallbacks_can_be_cleared():
    methods.record_fallback("op", "a test")
    assert methods.fallbacks(clear=True)[-1] == methods.Fallback("op", "a test")
    assert methods.fallbacks() == ()


@pytest.mark.parametrize("name", ["a]b", "a[b", "it's", 'a"b', "a/b|c%d", "a\\b", "ü"])
def test_marks_in_name_scopes_keep_any_label_and_reason(name):
    label, reason = f"linear (ub_name {name!r})", f"because {name} [4, 8]"

    def function(x):
        with methods.falling_back(label, reason):
            y = x @ x
        with methods.replicating(label, reason):
            assert methods.replicated() == reason
            return y @ x

    x = jnp.ones((4, 4))
    text = jax.jit(function).lower(x).compile().as_text()
    scopes = re.findall(r'op_name="([^"]*)"', text)
    wanted = methods.Fallback(label, reason)
    assert {methods.called_instead(s) for s in scopes} == {None, wanted}
    assert {methods.replicated_in(s) for s in scopes} == {None, wanted}
    assert methods.replicated() == ""
