"""Tests that the CUDA engine accepts all candidates for GPUs."""

import pytest
from covering import covering
from cuda_programs import attribute, called, cuda_text, custom_calls

from jax_ub._src.methods import KernelOptions, Method, MethodChoice
from jax_ub._src.runtime import cuda_engine
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, LOCAL_OPS, OPS, TunedKey
from jax_ub._src.tools.tune.cases import candidates, function, programs

DGRAD = MethodChoice(Method.PIPELINE, 2, KernelOptions(num_lanes=3, sm_margin=2))


_LOCAL = {"dgrad": "matmul", "dgrad_add": "matmul", "wgrad_accumulate": "wgrad"}


def targets_of(op, choice):
    if op != COLUMN_GRADIENTS:
        return {_LOCAL.get(op, op)}
    if choice.method is Method.BULK:
        return {"bulk_all_gather", "bulk_reduce_scatter"}
    return {"matmul_reduce_scatter", "all_gather", "wgrad"}


@covering(op=OPS, num_ranks=[2, 4])
def test_every_candidate_is_lowered_for_gpus(op, num_ranks, monkeypatch):
    pytest.importorskip("jax_ub._cuda", reason="built without nvcc")
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    ranks = 1 if op in LOCAL_OPS else num_ranks
    case = TunedKey(op, ranks, 64, 32, 48, "bfloat16")
    made = programs(case)
    for choice in candidates(case, True, DGRAD):
        candidate = made("", function(case, choice))
        # Lowering includes planning, which gives the size of the workspace.
        text = cuda_text(candidate.program, *candidate.operands)
        if choice.method is Method.XLA:
            assert not called(text)
            continue
        assert set(called(text)) == targets_of(op, choice)
        for name, call in custom_calls(text):
            # A separate wgrad has its own tuned choice.
            is_separate = name == "wgrad" and op == COLUMN_GRADIENTS
            wanted = KernelOptions() if is_separate else choice.kernel_options
            for field, value in wanted.attributes().items():
                assert attribute(call, field) == value
