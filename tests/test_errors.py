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


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("rank 0 waited 3 s for rank 1. JAX_UB_TIMEOUT_S sets", errors.TimeoutError),
        ("op x waited 1e-05 s for rank(s) 0 of 2", errors.TimeoutError),
        ("rank 1 died; rank 0 waited for chunk 1", errors.CommunicatorError),
        (
            "rank 0 waited 3 s for rank 1 when the communicator failed",
            errors.CommunicatorError,
        ),
        ("rank 1 missed its deadline", errors.CommunicatorError),
    ],
)
def test_only_a_wait_that_reached_its_deadline_is_a_timeout(text, kind):
    assert type(errors.of_failure(text)) is kind
    assert type(errors.of_engine(RuntimeError(f"CommunicatorError: {text}"))) is kind


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
