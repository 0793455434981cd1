import pytest

from jax_ub import _cpu
from jax_ub._src import methods
from jax_ub._src.methods import (
    KernelOptions,
    Method,
    MethodChoice,
    PallasTiles,
    Variant,
)
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


def test_method_of_the_wrong_type_is_rejected():
    with pytest.raises(UnknownNameError, match="method = 3 is of type int, not"):
        methods.resolve("op", 3, None)


def test_method_choice_is_written_as_tables_show_it():
    assert str(MethodChoice(Method.XLA)) == "xla"
    kernel_options = KernelOptions(sm_margin=2, variant=Variant.OVERLAP_FIRST_GEMM)
    assert str(MethodChoice(Method.PIPELINE, 4, kernel_options)) == (
        "pipeline, num_splits 4, sm_margin 2, variant overlap_first_gemm"
    )


def test_method_choice_with_tiles_names_the_next_fastest_method_too():
    tiles = PallasTiles(128, 64, "N", "M")
    assert str(MethodChoice(Method.PIPELINE, 2, pallas=tiles)) == (
        "pallas (two tiles of 128 x 64 along N, grid along M first), else pipeline, "
        "num_splits 2"
    )


def test_only_methods_that_are_not_explicit_may_fall_back():
    assert not MethodChoice(Method.BULK).may_fall_back
    assert MethodChoice(Method.BULK, is_explicit=False).may_fall_back
    assert MethodChoice(Method.AUTO).may_fall_back


def test_method_choice_of_another_method_keeps_splits_of_pipelines_only():
    asked = MethodChoice(Method.PIPELINE, 4, KernelOptions(num_lanes=1))
    assert asked.with_method(Method.PIPELINE) == asked
    assert asked.with_method(Method.DIRECT) == MethodChoice(
        Method.DIRECT, 0, KernelOptions(num_lanes=1)
    )
    assert MethodChoice(Method.AUTO).with_method(Method.BULK) == MethodChoice(
        Method.BULK, is_explicit=False
    )


def engine_names(**wrong):
    """Returns the engine's names of methods or variants, in the order of numbers."""
    call = {"op": "all_gather", "method": "bulk", "rank": 0, "num_ranks": 2}
    with pytest.raises(ValueError, match="is none of ") as error:
        _cpu.schedule(**{**call, "num_splits": 1, **wrong})
    return str(error.value).split(" is none of ")[1].split(", ")


def test_the_engine_has_the_same_numbers():
    engine = [method for method in Method if method not in (Method.AUTO, Method.XLA)]
    names = {method.code: method.value for method in engine}
    assert dict(enumerate(engine_names(method="?"))) == names
    names = {variant.code: variant.value for variant in Variant}
    assert dict(enumerate(engine_names(variant="?"))) == names
    assert _cpu.default_splits == methods.DEFAULT_SPLITS
