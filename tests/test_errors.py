import ast
import inspect
import pathlib
import pickle
import re

import jax
import pytest

import jax_ub
from jax_ub import ops
from jax_ub._src import errors

SRC = pathlib.Path(errors.__file__).parent


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


def test_errors_of_synchronous_programs_are_converted_too():
    text = "ABORTED: CommunicatorError: op: rank 1 died"
    with pytest.raises(errors.CommunicatorError, match="^op: rank 1"), errors.raised():
        raise ValueError(text)


def test_other_errors_are_not_converted():
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"), errors.raised():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_nearest_name_is_found():
    assert errors.nearest("colum", ["column", "row"]) == (
        "Did you mean 'column'? Known: 'column', 'row'."
    )
    assert errors.nearest("zzz", ["column"]) == "Known: 'column'."


def test_the_guide_has_every_error():
    top = pathlib.Path(__file__).parents[1]
    text = (top / "docs/troubleshooting.md").read_text()
    own = [name for name in jax_ub.errors.__all__ if name.endswith("Error")]
    assert len(own) > 5
    assert [name for name in own if f"{name}`" not in text] == []


def test_an_error_has_a_note_with_the_page_that_explains_it():
    named = {
        "initialize_ub: tp_size = 0": "docs/initialize_ub.md",
        "linear (ub_name 'qkv'): method": "docs/functions.md",
        "linear(parallel='row'): data_axes = ('x',)": "docs/flax.md",
        "linear(parallel='row'): fsdp_axes has 'x', which": "docs/fsdp.md",
        "linear(parallel='row') (layer 'a'): the kernel": "docs/retrofit.md",
        "linear: axis ('tp',) has no overlap 'q'. Known: ": "docs/initialize_ub.md",
        "linear: DelayedScaling needs a state, but fp8_state": "docs/fp8.md",
        "overlap: fp8 = 'delayed' is not a recipe": "docs/fp8.md",
        "overlap: the rule 'x' matches": "docs/retrofit.md",
        "Linear: it has no argument 'axis'. Known: 'fsdp_axes', 'fp8'": "docs/flax.md",
        "LayerNormMLP: ub_overlap_ag = True and": "docs/transformer_engine.md",
        "Linear: it has no argument 'tp_group', which is Transformer Engine's. D": (
            "docs/transformer_engine.md"
        ),
        "Linear: it has no argument 'gather_output', which is Megatron-LM's. L": (
            "docs/megatron.md"
        ),
        "Overlap: it has no argument 'axs'": "docs/retrofit.md",
        "operation 3 (Bias): the channel": "docs/ops.md",
        "ForwardLinearScaleAdd: linear is missing": "docs/ops.md",
        "trace: another trace is being recorded": "docs/trace.md",
        "JAX_UB_TIMEOUT_S = 'x' is not": "docs/functions.md#environment-variables",
        "Linear: JAX_UB_METHOD = 'x' is": "docs/functions.md#environment-variables",
        "operation 0 (x): JAX_UB_TUNED: x": "docs/functions.md#environment-variables",
        "Linear: method = 'x'. Set JAX_UB_METHOD=xla": "docs/flax.md",
    }
    for message, page in named.items():
        error = errors.ConfigurationError(message)
        assert (str(error), error.__notes__) == (message, [errors.see(page)])
    failed = errors.of_failure("linear: rank 1 died")
    assert failed.__notes__ == [errors.see(errors.CommunicatorError.page)]
    assert pickle.loads(pickle.dumps(failed)).__notes__ == failed.__notes__
    assert not hasattr(errors.UbError("another: text"), "__notes__")
    assert not hasattr(errors.UbError(), "__notes__")


def test_errors_of_every_operation_name_the_page_of_operations():
    public = [getattr(ops, name) for name in ops.__all__]
    classes = [each for each in public if isinstance(each, type)]
    names = [*(each.__name__ for each in classes), *ops.fused.__all__, "ops.Linear"]
    for name in {*names} - {"Linear"}:
        assert errors.page_of(f"{name}: text") == "docs/ops.md", name


def test_errors_of_every_public_function_name_a_page():
    modules = (jax_ub, jax_ub.flax, jax_ub.fp8, ops)
    public = [getattr(module, name) for module in modules for name in module.__all__]
    functions = filter(inspect.isfunction, public)
    names = {each.__name__ for each in functions if "Raises:" in each.__doc__}
    # Its errors are `CommunicatorError`s, which have a page.
    names.remove("check_communicators")
    assert len(names) > 25
    assert [name for name in names if errors.page_of(f"{name}: text") is None] == []


def test_every_page_that_a_message_names_exists():
    top = pathlib.Path(__file__).parents[1]
    sources = [top / "jax_ub/__main__.py", *SRC.rglob("*.py")]
    pattern = r"docs/[\w/-]+\.md(?:#[\w-]+)?"
    named = {n for path in sources for n in re.findall(pattern, path.read_text())}
    assert {*errors._PAGES, errors.CommunicatorError.page} <= named
    for page, _, anchor in (name.partition("#") for name in named):
        titles = re.findall(r"^#+ (.*)$", (top / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
        assert not anchor or anchor in anchors, f"{page}#{anchor}"


class BrokenRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def test_a_value_is_shown_by_its_repr():
    assert errors.shown("tp") == "'tp'"


def test_a_value_without_a_repr_is_shown_by_its_type():
    assert errors.shown(BrokenRepr()) == "<BrokenRepr without a repr>"
    assert errors.shown([BrokenRepr()]) == "<list without a repr>"
    assert errors.shown(10**5000) == "<int without a repr>"


def test_a_long_value_is_shortened():
    assert errors.shown("x" * 1000) == f"'{'x' * 199}... (1002 characters)"


def test_values_that_are_no_strings_have_no_nearest_name():
    assert errors.nearest(BrokenRepr(), ["column"]) == "Known: 'column'."


def test_errors_never_format_a_value_by_its_repr():
    found = [
        f"{path.relative_to(SRC)}:{value.lineno}"
        for path in sorted(SRC.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for value in ast.walk(node)
        if isinstance(value, ast.FormattedValue) and value.conversion == ord("r")
    ]
    assert not found, "use {shown(value)}: a repr may raise, or have no end"


def test_timeout_error_is_a_builtin_and_a_communicator_error():
    error = errors.of_failure("op: rank 1 waited 3 s for rank 0")
    assert isinstance(error, TimeoutError) and isinstance(error, OSError)
    assert isinstance(error, errors.CommunicatorError)
    assert str(error) == "op: rank 1 waited 3 s for rank 0"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
