import pathlib

import jax
import pytest

from jax_ub import errors


def test_deadline_becomes_a_timeout_error():
    text = "DEADLINE_EXCEEDED: CommunicatorError: op: rank 1 waited 3 s for rank 0"
    with (
        pytest.raises(errors.TimeoutError, match="^op: rank 1 waited"),
        errors.raised(),
    ):
        raise jax.errors.JaxRuntimeError(text)


def test_other_failures_become_a_communicator_error():
    text = "INTERNAL: CommunicatorError: op: rank 1 has another shape"
    with pytest.raises(errors.CommunicatorError, match="^op: rank 1"), errors.raised():
        raise jax.errors.JaxRuntimeError(text)


def test_errors_of_programs_that_run_at_once_are_converted_too():
    text = "ABORTED: CommunicatorError: op: rank 1 died"
    with pytest.raises(errors.CommunicatorError, match="^op: rank 1"), errors.raised():
        raise ValueError(text)


def test_errors_of_others_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"), errors.raised():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_nearest_name_is_found():
    assert errors.nearest("colum", ["column", "row"]) == (
        "Did you mean 'column'? Known: 'column', 'row'."
    )
    assert errors.nearest("zzz", ["column"]) == "Known: 'column'."


def test_the_guide_has_every_error():
    text = (
        pathlib.Path(errors.__file__).parents[1] / "docs/troubleshooting.md"
    ).read_text()
    own = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert len(own) > 5
    assert [name for name in own if f"{name}`" not in text] == []
