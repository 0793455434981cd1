from jax_ub.methods import Method, Variant
from jax_ub.overlap_config.choice import Choice
from jax_ub.overlap_config.tuning import Tuning


def test_is_written_as_tables_show_it():
    assert str(Choice(Method.XLA)) == "xla"
    tuning = Tuning(sm_margin=2, variant=Variant.OVERLAP_FIRST_GEMM)
    assert str(Choice(Method.PIPELINE, 4, tuning)) == (
        "pipeline, num_splits 4, sm_margin 2, variant overlap_first_gemm"
    )


def test_falls_back_where_nobody_asked_for_it():
    assert not Choice(Method.BULK).falls_back
    assert Choice(Method.BULK, is_asked=False).falls_back
    assert Choice(Method.AUTO).falls_back


def test_parts_fall_back_as_the_whole_and_only_pipelines_have_splits():
    asked = Choice(Method.PIPELINE, 4, Tuning(num_lanes=1))
    assert asked.by(Method.PIPELINE) == asked
    assert asked.by(Method.DIRECT) == Choice(Method.DIRECT, 0, Tuning(num_lanes=1))
    assert Choice(Method.AUTO).by(Method.BULK) == Choice(Method.BULK, is_asked=False)
