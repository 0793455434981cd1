import dataclasses

import pytest

from jax_ub.__main__ import main
from jax_ub._src.methods import PALLAS_TILES, Method, MethodChoice
from jax_ub._src.runtime import tuned_file
from jax_ub._src.runtime.tuned_file import TunedKey, environment
from jax_ub._src.tools import programs
from jax_ub._src.tools.bench import cases, linear, report
from jax_ub._src.tools.bench.cases import Setup, check_agreement
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import Ranks
from jax_ub._src.tools.tune import command as tune
from jax_ub._src.tools.tune.cases import candidates

SMALL = Shape(64, 32, 48)
COLUMN = linear.LINEAR_OPS["all_gather_matmul"]


@pytest.fixture
def on_gpus(monkeypatch):
    """Sets `Ranks.platform` to "gpu", so that benchmarks treat CPU devices as GPUs."""
    monkeypatch.setattr(Ranks, "platform", "gpu")


def case_of_two_ranks(dtype="float32"):
    setup = Setup(Ranks(2), dtype)
    (case,) = linear.linear(COLUMN, setup, SMALL)
    return case


def test_a_case_on_cpus_does_not_mention_the_kernel():
    case = case_of_two_ranks()
    assert not case.notes
    assert cases.PALLAS not in {candidate.name for candidate in case.candidates}


def test_a_case_without_the_kernel_states_the_reason(on_gpus):
    case = case_of_two_ranks()
    assert case.notes == (
        "pallas: all_gather_matmul 64x32x48 float32 P=2: it needs compute capability "
        "9.0, not unknown",
    )
    assert cases.PALLAS not in {candidate.name for candidate in case.candidates}


@pytest.fixture
def substitute(monkeypatch):
    """Sets the programs that take the place of the kernel, which needs GPUs."""

    def set_programs(function):
        found = dict.fromkeys(PALLAS_TILES[:2], function)
        monkeypatch.setattr(programs, "pallas_programs", lambda *arguments: found)

    return set_programs


def fails(x, w):
    raise ValueError("exceeds available shared memory\nmore")


def test_the_fastest_kernel_is_a_column_of_the_table(on_gpus, substitute):
    substitute(COLUMN.naive)
    case = case_of_two_ranks()
    assert case[cases.PALLAS].variant in PALLAS_TILES[:2]
    check_agreement(case)
    times = {c.name: [1e-3] * 3 for c in case.candidates} | {cases.PALLAS: [2e-3] * 3}
    result = report.evaluate(case, report.Rounds(times, 0.0))
    head, _, row = report.table([result]).splitlines()
    cells = dict(zip(*(map(str.strip, t.split("|")) for t in (head, row)), strict=True))
    assert cells["pallas"] == "2.00 ±0%"


def test_a_kernel_that_fails_is_a_note(on_gpus, substitute):
    substitute(fails)
    (note,) = case_of_two_ranks().notes
    assert note.endswith("P=2: it failed: exceeds available shared memory")


CASE = TunedKey("all_gather_matmul", 2, 64, 32, 48, "float32")


def test_tune_times_the_kernel_and_chooses_it_only_if_it_is_allowed(
    on_gpus, substitute
):
    choices = candidates(CASE, is_cuda=False)
    substitute(COLUMN.naive)
    measured = tune.measure(CASE, choices, rounds=1)
    assert set(measured.seconds) == set(choices)
    assert not measured.failed
    assert measured.times_us[cases.PALLAS] > 0
    best, best_s = next(iter(measured.seconds.items()))
    _, tiles = measured.pallas
    assert tiles in PALLAS_TILES[:2]
    faster = dataclasses.replace(measured, pallas=(best_s / 2, tiles))
    assert faster.best(allow_pallas=False) == best
    chosen = faster.best(allow_pallas=True)
    assert chosen == dataclasses.replace(best, pallas=tiles)
    assert faster.text(chosen).startswith(f"pallas ({tiles}), else {best}: ")
    slower = dataclasses.replace(measured, pallas=(best_s * 2, tiles))
    assert slower.best(allow_pallas=True) == best


def test_tune_reports_a_kernel_that_fails(on_gpus, substitute):
    substitute(fails)
    choices = candidates(CASE, is_cuda=False)[:1]
    measured = tune.measure(CASE, choices, rounds=1)
    reason = "it failed: exceeds available shared memory"
    assert measured.failed == {cases.PALLAS: reason}
    assert measured.best(allow_pallas=True) == choices[0]


@pytest.mark.parametrize("allowed", [False, True])
def test_the_tuned_file_has_the_kernel_only_if_it_is_allowed(
    on_gpus, monkeypatch, tmp_path, capsys, allowed
):
    tiles, choice = PALLAS_TILES[1], MethodChoice(Method.PIPELINE, 2)
    measured = tune.Measured({choice: 2e-3}, {}, (1e-3, tiles))
    monkeypatch.setattr(tune, "_start", lambda *arguments: True)
    monkeypatch.setattr(tune, "cases", lambda *arguments: [CASE])
    monkeypatch.setattr(tune, "measure", lambda *arguments: measured)
    path = tmp_path / "t.json"
    arguments = ["tune", "--shapes", "64x32x48", "--output", str(path)]
    assert main([*arguments, *["--allow-pallas"] * allowed]) == 0
    text = capsys.readouterr().out
    expected = dataclasses.replace(choice, pallas=tiles if allowed else None)
    times_us = {str(choice): 2000, cases.PALLAS: 1000}
    assert tuned_file.read(path)[environment()] == {CASE: (expected, times_us)}
    assert f" {expected}: {1000 if allowed else 2000} us" in text
    assert ("pallas: 1000 us, for comparison" in text) == (not allowed)
    flag = "--xla_gpu_disable_async_collectives=ALLCOLLECTIVES"
    assert (f'"auto" runs JAX\'s Pallas kernel only with {flag}' in text) == allowed


def test_cpus_have_no_kernel_to_allow(tmp_path, capsys):
    arguments = ["tune", "--platform", "cpu", "--allow-pallas", "--output"]
    assert main([*arguments, str(tmp_path / "t.json")]) == 2
    assert "--allow-pallas allows a kernel for GPUs" in capsys.readouterr().err
