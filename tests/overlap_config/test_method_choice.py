from jax_ub._src.config.kernel_options import KernelOptions
from jax_ub._src.config.method_choice import MethodChoice
from jax_ub._src.methods import Method, Variant


def test_is_written_as_tables_show_it():
    assert str(MethodChoice(Method.XLA)) == "xla"
    kernel_options = KernelOptions(sm_margin=2, variant=Variant.OVERLAP_FIRST_GEMM)
    assert str(MethodChoice(Method.PIPELINE, 4, kernel_options)) == (
        "pipeline, num_splits 4, sm_margin 2, variant overlap_first_gemm"
    )


def test_falls_back_where_nobody_asked_for_it():
    assert not MethodChoice(Method.BULK).may_fall_back
    assert MethodChoice(Method.BULK, is_explicit=False).may_fall_back
    assert MethodChoice(Method.AUTO).may_fall_back


def test_parts_fall_back_as_the_whole_and_only_pipelines_have_splits():
    asked = MethodChoice(Method.PIPELINE, 4, KernelOptions(num_lanes=1))
    assert asked.with_method(Method.PIPELINE) == asked
    assert asked.with_method(Method.DIRECT) == MethodChoice(
        Method.DIRECT, 0, KernelOptions(num_lanes=1)
    )
    assert MethodChoice(Method.AUTO).with_method(Method.BULK) == MethodChoice(
        Method.BULK, is_explicit=False
    )
