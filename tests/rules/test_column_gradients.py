"""The lowering of the gradients of AG+GEMM if GPUs are the default."""

import jax
import numpy as np
import pytest
from cuda_programs import attribute, cuda_text, custom_calls, shape
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.methods import KernelOptions, Method, MethodChoice
from jax_ub._src.rules.call_config import plan_call_config
from jax_ub._src.runtime import cuda_engine, tuned_file
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, TunedKey, environment

COLUMN = (P("tp"), P(None, "tp"))


def backward_of_column(monkeypatch, num_kernels, **options):
    """Returns the calls of a column layer and its gradients if GPUs are the default."""
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    run = on_ranks(
        lambda x, w: sum(
            ub.all_gather_matmul(x, (w,) * num_kernels, axis_name="tp", **options)
        ),
        tp_mesh(4),
        COLUMN,
        P(None, "tp"),
    )
    step = jax.jit(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), argnums=(0, 1)))
    operands = (shape(8, 8, dtype="bfloat16"), shape(8, 8, dtype="bfloat16"))
    return dict(custom_calls(cuda_text(step, *operands)))


@pytest.mark.parametrize(("num_kernels", "sent"), [(1, "bf16"), (2, "f32")])
def test_a_column_layer_gathers_during_its_dgrad_if_gpus_are_the_default(
    engine, monkeypatch, num_kernels, sent
):
    calls = backward_of_column(monkeypatch, num_kernels)
    assert set(calls) == {
        "all_gather_matmul",
        "bulk_all_gather",
        "bulk_reduce_scatter",
    }
    assert f"-> (tensor<8x8x{sent}>, tensor<8x8xbf16>" in calls["bulk_all_gather"]


def test_each_bulk_call_has_the_options_of_its_own_pass(engine, monkeypatch):
    names = {"qkv_dgrad": "bulk_all_gather", "qkv_wgrad": "bulk_reduce_scatter"}
    for configured in names:
        cfgs = {configured: {"method": "bulk", "num_sm": 5}}
        ub.initialize_ub((8, 8), 4, ub_cfgs=cfgs, mesh=tp_mesh(4))
        calls = backward_of_column(monkeypatch, 1, ub_name="qkv")
        found = {name: attribute(calls[op], "num_sm") for name, op in names.items()}
        # A wgrad that is not configured takes the dgrad's options.
        sizes = {"qkv_dgrad": (5, 5), "qkv_wgrad": (16, 5)}[configured]
        assert tuple(found.values()) == sizes
        ub.destroy_ub()


def tuned_backward_of_column(tmp_path, monkeypatch, *found):
    """Returns the calls of a column layer's gradients with a file of tuned choices."""
    path = tmp_path / "t.json"
    entries = {
        TunedKey(op, 4, 8, 8, 8, "bfloat16"): (choice, {}) for op, choice in found
    }
    tuned_file.write(path, {environment(): entries})
    ub.initialize_ub((8, 8), 4, ub_cfgs=path, mesh=tp_mesh(4))
    return backward_of_column(monkeypatch, 1)


def test_tuned_bulk_calls_have_the_tuned_options(engine, monkeypatch, tmp_path):
    kernel_options = KernelOptions(
        use_ce=False, num_sm=4, sm_margin=4, gemm_algorithm=3
    )
    choice = MethodChoice(Method.BULK, kernel_options=kernel_options)
    calls = tuned_backward_of_column(tmp_path, monkeypatch, (COLUMN_GRADIENTS, choice))
    for name in ("bulk_all_gather", "bulk_reduce_scatter"):
        for field, value in kernel_options.attributes().items():
            assert attribute(calls[name], field) == value
    assert attribute(calls["all_gather_matmul"], "gemm_algorithm") == 0


def test_a_dgrad_that_was_faster_with_its_own_communication_overlaps_it(
    engine, monkeypatch, tmp_path
):
    choice = MethodChoice(Method.PIPELINE, 2, KernelOptions(num_lanes=3, sm_margin=2))
    calls = tuned_backward_of_column(tmp_path, monkeypatch, (COLUMN_GRADIENTS, choice))
    assert set(calls) == {
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_gather",
        "wgrad",
    }
    dgrad = calls["matmul_reduce_scatter"]
    for name, value in {
        "method": Method.PIPELINE.code,
        "num_splits": 2,
        "num_lanes": 3,
        "sm_margin": 2,
    }.items():
        assert attribute(dgrad, name) == value
    assert attribute(calls["wgrad"], "gather") == 0


def test_a_backward_that_is_faster_without_overlap_has_none(
    engine, monkeypatch, tmp_path
):
    calls = tuned_backward_of_column(
        tmp_path, monkeypatch, (COLUMN_GRADIENTS, MethodChoice(Method.XLA))
    )
    assert set(calls) == {"all_gather_matmul"}


def test_a_tuned_backward_that_cannot_run_falls_back(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_engine, "MOST_RANKS", 3)
    choice = MethodChoice(Method.PIPELINE, 2)
    calls = tuned_backward_of_column(tmp_path, monkeypatch, (COLUMN_GRADIENTS, choice))
    assert set(calls) <= {"wgrad"}  # which communicates nothing


def test_bulk_by_default_is_not_used_where_it_cannot_run(engine, monkeypatch):
    monkeypatch.setattr(cuda_engine, "MOST_RANKS", 3)
    assert not backward_of_column(monkeypatch, 3)


# JAX lowers a program for the devices of its mesh, not of the default backend.
def test_the_plan_follows_the_devices_of_the_mesh(monkeypatch):
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(tuned_file, "process_table", lambda: pytest.fail("of the GPUs"))
    found = []

    def function(x):
        call_config = plan_call_config("all_gather_matmul", ("tp",), 2, None, None)
        found.append(
            (
                call_config.is_on_cuda,
                call_config.materializes_gather,
                call_config.uses_bulk,
            )
        )
        found.append(call_config.partial_dtype(1))
        return x

    jax.eval_shape(on_ranks(function, tp_mesh(2), P("tp"), P("tp")), shape(8, 8))
    assert found == [(False, False, False), np.dtype(np.float32)]
    # Without a mesh of devices, the default backend decides.
    assert cuda_engine.is_traced_for()
