"""Tests `python -m jax_ub tune` and its candidates."""

import dataclasses
import json

import jax
import pytest

from jax_ub.__main__ import main
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.runtime import registry, tuned_file
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES
from jax_ub._src.runtime.tuned_file import (
    COLUMN_GRADIENTS,
    LOCAL_OPS,
    OPS,
    TunedKey,
    environment,
)
from jax_ub._src.tools.tune import command
from jax_ub._src.tools.tune.cases import candidates, dgrad_of

# The ops that overlap a GEMM with communication.
FUSED = [op for op in OPS if op not in (COLUMN_GRADIENTS, *LOCAL_OPS)]


def tune(path, *arguments):
    return main(
        ["tune", "--platform", "cpu", "--rounds", "1", "--output", path, *arguments]
    )


def test_fastest_candidate_of_each_case_is_stored(tmp_path, capsys):
    path = str(tmp_path / "tuned.json")
    assert tune(path, "--tp", "2", "--shapes", "32x48x80", "--dtypes", "f32") == 0
    found = tuned_file.read(path)[environment()]
    assert [case.op for case in found] == [*FUSED, COLUMN_GRADIENTS]
    # The row linear that follows the column linear is tuned, too.
    sizes = {case.op: (case.M, case.K, case.N) for case in found}
    assert sizes["all_gather_matmul"] == (32, 48, 80)
    assert sizes["matmul_reduce_scatter"] == (32, 80, 48)
    for case, (choice, times_us) in found.items():
        product = found.get(dgrad_of(case), (None,))[0]
        choices = candidates(case, is_cuda=False, dgrad=product)
        wanted = {str(candidate) for candidate in choices}
        assert set(times_us) == wanted
        assert min(times_us, key=times_us.get) == str(choice)
        assert min(times_us.values()) > 0
    text = capsys.readouterr().out
    for choice, _ in found.values():
        assert f" {choice}: " in text


def test_one_rank_has_nothing_to_tune_on_cpus(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    assert tune(str(path), "--tp", "2,1", "--shapes", "32x48x80") == 2
    assert "tune: --tp 1 tunes the GEMMs of one GPU" in capsys.readouterr().err
    assert not path.exists()


def test_f16_is_tuned_and_used(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "tuned.json")
    assert tune(path, "--shapes", "32x48x80", "--dtypes", "f16,f32") == 0
    text = capsys.readouterr().out
    found = tuned_file.read(path)[environment()]
    assert {case.dtype for case in found} == {"float16", "float32"}
    num_candidates = sum(len(times_us) for _, times_us in found.values())
    assert f"ran {num_candidates} candidates of 8 cases 2 times each" in text
    monkeypatch.setenv("JAX_UB_TUNED", path)
    case = TunedKey("all_gather_matmul", 2, 32, 48, 80, "float16")
    assert registry.tuned_table(("tp",), 2).by_case[case] == found[case][0]


def test_second_run_keeps_the_entries_of_the_file(tmp_path):
    path = str(tmp_path / "tuned.json")
    tune(path, "--shapes", "32x48x80", "--dtypes", "f32")
    elsewhere = json.loads((tmp_path / "tuned.json").read_text())
    elsewhere["tunings"].append({**elsewhere["tunings"][0], "device": "another"})
    (tmp_path / "tuned.json").write_text(json.dumps(elsewhere))
    tune(path, "--shapes", "32x48x96", "--dtypes", "f32")
    tunings = tuned_file.read(path)
    assert {found.device for found in tunings} == {environment().device, "another"}
    assert {case.N for case in tunings[environment()] if case.op == OPS[0]} == {80, 96}


def test_a_concurrent_run_keeps_its_entries(tmp_path, monkeypatch):
    path, other = tmp_path / "tuned.json", tmp_path / "other.json"
    arguments = "--dtypes", "f32", "--shapes"
    tune(str(other), *arguments, "32x48x80")
    measure = command.measure

    def measure_while_another_run_writes(*given):
        if other.exists():
            other.rename(path)
        return measure(*given)

    monkeypatch.setattr(command, "measure", measure_while_another_run_writes)
    tune(str(path), *arguments, "32x48x96")
    (cases,) = tuned_file.read(path).values()
    assert {case.N for case in cases if case.op == OPS[0]} == {80, 96}


def tuned_key(op, num_ranks, M=8192):
    return TunedKey(op, num_ranks, M, 8192, 8192, "bfloat16")


@pytest.mark.parametrize("op", FUSED)
def test_gpus_are_tuned_for_streams_margins_and_algorithms_too(op):
    choices = candidates(tuned_key(op, 4), is_cuda=True)
    assert len(set(choices)) == len(set(map(str, choices))) == len(choices)
    by_engines = [choice for choice in choices if choice.kernel_options.use_ce]
    assert {choice.kernel_options.num_lanes for choice in choices} == {1, 2, 3}
    assert {choice.kernel_options.sm_margin for choice in by_engines} == {0, 4}
    assert {choice.kernel_options.gemm_algorithm for choice in choices} == {0, 1, 2, 3}
    assert all(choice.method is not Method.DIRECT for choice in choices)
    assert choices[-1].method is Method.XLA


@pytest.mark.parametrize("op", (*FUSED, COLUMN_GRADIENTS))
def test_kernels_send_chunks_that_are_not_split(op):
    choices = candidates(tuned_key(op, 4, 16), is_cuda=True)
    found = [choice for choice in choices if not choice.kernel_options.use_ce]
    tunings = {(c.kernel_options.num_sm, c.kernel_options.sm_margin) for c in found}
    assert tunings == {(4, 4), (16, 16)}
    assert all(choice.num_splits <= 1 for choice in found)
    # "overlap_first_gemm" splits chunks.
    kinds = {(choice.method, choice.kernel_options.variant) for choice in found}
    assert {variant for _, variant in kinds} <= {
        Variant.PLAIN,
        Variant.AGGREGATE,
        Variant.ONE_SHOT,
    }
    assert len(found) == 2 * len(kinds)
    assert not any(
        not c.kernel_options.use_ce for c in candidates(tuned_key(op, 4, 16), False)
    )


@pytest.mark.parametrize(
    ("op", "on_cpus", "on_gpus"),
    [
        ("all_gather_matmul", 8, 63),
        ("matmul_reduce_scatter", 7, 79),
        ("matmul_all_reduce", 7, 90),
        (COLUMN_GRADIENTS, 4, 10),
    ],
)
def test_numbers_of_candidates_are_those_of_the_guide(op, on_cpus, on_gpus):
    case, dgrad = tuned_key(op, 4, 16), MethodChoice(Method.PIPELINE, 2)
    assert len(candidates(case, False, dgrad)) == on_cpus
    assert len(candidates(case, True, dgrad)) == on_gpus


@pytest.mark.parametrize("is_cuda", [False, True])
def test_column_gradients_are_bulk_or_use_the_tuned_dgrad(is_cuda):
    dgrad = MethodChoice(Method.PIPELINE, 2, KernelOptions(num_lanes=3))
    choices = candidates(tuned_key(COLUMN_GRADIENTS, 4), is_cuda, dgrad)
    assert len(set(choices)) == len(choices)
    bulk = [choice for choice in choices if choice.method is Method.BULK]
    by_engines = [c for c in bulk if c.kernel_options.use_ce]
    tunings = {
        (c.kernel_options.sm_margin, c.kernel_options.gemm_algorithm)
        for c in by_engines
    }
    on_gpus = {(0, 0), (4, 1), (4, 2), (4, 3)}
    assert tunings == {(4, 0)} | (on_gpus if is_cuda else set())
    separate = Method.RING_EXCHANGE if is_cuda else Method.DIRECT
    assert choices[len(bulk) :] == [
        MethodChoice(separate),
        dgrad,
        MethodChoice(Method.XLA),
    ]
    again = candidates(
        tuned_key(COLUMN_GRADIENTS, 4), is_cuda, MethodChoice(Method.XLA)
    )
    assert again == [*bulk, MethodChoice(separate), MethodChoice(Method.XLA)]


def variants(case, is_cuda):
    choices = candidates(case, is_cuda)
    return {choice.kernel_options.variant for choice in choices} - {Variant.PLAIN}


@pytest.mark.parametrize("is_cuda", [False, True])
def test_variants_are_candidates_where_they_have_an_effect(is_cuda):
    later = {Variant.OVERLAP_FIRST_GEMM} if is_cuda else set()
    found = {op: variants(tuned_key(op, 4, 16), is_cuda) for op in FUSED}
    assert found["all_gather_matmul"] == {Variant.AGGREGATE}
    assert found["matmul_reduce_scatter"] == later
    few = {Variant.ONE_SHOT} if is_cuda else set()
    assert found["matmul_all_reduce"] == later | few
    for num_ranks in (2, 3):
        assert not variants(tuned_key("all_gather_matmul", num_ranks), is_cuda)


@pytest.mark.parametrize(
    "num_ranks, most", [(3, 8192), (8, ONE_SHOT_BYTES // 7 // 16384)]
)
def test_one_shot_is_a_candidate_if_it_fits_the_heap(num_ranks, most):
    case = tuned_key("matmul_all_reduce", num_ranks, most)
    assert Variant.ONE_SHOT in variants(case, is_cuda=True)
    assert (Variant.ONE_SHOT in variants(case, is_cuda=False)) == (num_ranks == 3)
    if num_ranks == 8:
        more = dataclasses.replace(case, M=most + 1)
        assert Variant.ONE_SHOT not in variants(more, is_cuda=True)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--tokens", "64"], "--tokens 64 is the M of a --model. Add --model."),
        (["--shapes", "33x48x80"], "shape 33x48x80 does not divide into 2 ranks"),
        (["--model", "llama3-70b", "--tokens", "3"], "3x8192x10240 does not divide"),
        (["--tp", "1", "--allow-pallas"], "--tp 1 tunes GEMMs without communication"),
        (["--dtypes", "f32", "--allow-pallas"], "multiplies bfloat16 and float16 only"),
        (
            ["--model", "llama3-70b", "--shapes", "32x48x80"],
            "--shapes and --model exclude each other",
        ),
    ],
)
def test_invalid_arguments_are_errors(arguments, text, tmp_path, capsys):
    assert tune(str(tmp_path / "tuned.json"), *arguments) == 2
    assert text in capsys.readouterr().err


def test_an_invalid_variable_ends_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_UB_NUM_THREADS", "many")
    path = tmp_path / "tuned.json"
    assert tune(str(path), "--shapes", "32x48x80") == 2
    assert "JAX_UB_NUM_THREADS = 'many' is not a positive" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1, "tunings": [1]}'])
def test_a_file_that_is_not_a_tuned_file_is_kept(text, tmp_path, capsys):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    assert tune(str(path), "--shapes", "32x48x80") == 2
    assert "Delete it, or name another file in --output" in capsys.readouterr().err
    assert path.read_text() == text


def test_an_unknown_model_names_the_option(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tune(str(tmp_path / "tuned.json"), "--model", "llama3")
    assert "--model: 'llama3' is not known. Did you mean" in capsys.readouterr().err


def test_missing_gpus_are_an_error(tmp_path, capsys):
    jax.devices()  # before the command, which would otherwise request another platform
    path = str(tmp_path / "tuned.json")
    assert main(["tune", "--platform", "cuda", "--output", path]) == 2
    assert "0 CUDA devices here" in capsys.readouterr().err
