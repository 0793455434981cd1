import re

import jax
import jax.numpy as jnp
import pytest

from jax_ub._src import lowering_log
from jax_ub._src.tools.explain.program import compiled_text
from jax_ub.errors import UnknownNameError


def test_record_of_fallbacks_is_bounded():
    for i in range(3000):
        lowering_log.record_fallback(f"op {i}", "a test")
    recorded = lowering_log.fallbacks()
    assert len(recorded) == 1024
    assert recorded[-1] == lowering_log.Fallback("op 2999", "a test")


def test_record_of_fallbacks_can_be_cleared():
    lowering_log.record_fallback("op", "a test")
    assert lowering_log.fallbacks(clear=True)[-1] == lowering_log.Fallback(
        "op", "a test"
    )
    assert lowering_log.fallbacks() == ()


def test_clear_is_a_bool():
    lowering_log.record_fallback("op", "a test")
    with pytest.raises(UnknownNameError, match="fallbacks: clear = 'no' is not a bool"):
        lowering_log.fallbacks(clear="no")
    assert lowering_log.fallbacks()


@pytest.mark.parametrize("name", ["a]b", "a[b", "it's", 'a"b', "a/b|c%d", "a\\b", "ü"])
def test_marks_in_name_scopes_keep_any_label_and_reason(name):
    label, reason = f"linear (ub_name {name!r})", f"because {name} [4, 8]"

    def function(x):
        with lowering_log.falling_back(label, reason):
            y = x @ x
        with lowering_log.replicating(label, reason):
            assert lowering_log.replicated() == reason
            return y @ x

    x = jnp.ones((4, 4))
    text = compiled_text(jax.jit(function).trace(x))
    scopes = re.findall(r'op_name="([^"]*)"', text)
    wanted = lowering_log.Fallback(label, reason)
    assert {lowering_log.fallback_in(s) for s in scopes} == {None, wanted}
    assert {lowering_log.replicated_in(s) for s in scopes} == {None, wanted}
    assert lowering_log.replicated() == ""
