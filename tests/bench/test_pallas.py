import jax
import pytest

from jax_ub._src.tools.bench import cases, linear, pallas, peers, report
from jax_ub._src.tools.bench.cases import Setup, check_agreement
from jax_ub._src.tools.bench.peers import FastestDots
from jax_ub._src.tools.devices import Ranks
from jax_ub._src.tools.options import Shape
from jax_ub._src.tools.tune import command as tune
from jax_ub._src.tools.tune.cases import TunedKey, candidates

LARGE = Shape(8192, 8192, 10240)
SMALL = Shape(64, 32, 48)
COLUMN = linear.LINEAR_OPS["all_gather_matmul"]


@pytest.mark.parametrize(
    ("shape", "num_ranks", "expected"),
    [
        (Shape(1024, 64, 1024), 4, pallas.TILES),
        (Shape(512, 64, 1024), 4, [pallas.TILES[0], pallas.TILES[2]]),
        (Shape(1024, 64, 512), 4, pallas.TILES[1:]),
        (Shape(512, 64, 512), 4, [pallas.TILES[2]]),
        (Shape(512, 64, 320), 4, []),
        (Shape(256, 64, 512), 4, []),
        (Shape(512, 96, 512), 4, []),
    ],
)
def test_tiles_divide_the_rows_and_columns_of_a_rank(shape, num_ranks, expected):
    assert pallas.tiles_of(shape, num_ranks) == list(expected)


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that sets the numbers of devices that JAX reports."""

    def set_numbers(num_devices, num_local):
        monkeypatch.setattr(jax, "device_count", lambda: num_devices)
        monkeypatch.setattr(jax, "local_device_count", lambda: num_local)

    set_numbers(8, 8)
    return set_numbers


def test_a_hopper_process_with_all_gpus_has_the_kernel(gpus):
    for dtype in ("bfloat16", "float16"):
        assert pallas.why_not(LARGE, dtype, 8, "9.0") is None


@pytest.mark.parametrize(
    ("capability", "dtype", "num_ranks", "numbers", "shape", "reason"),
    [
        ("8.0", "bfloat16", 8, (8, 8), LARGE, "needs compute capability 9.0, not 8.0"),
        ("10.0", "bfloat16", 8, (8, 8), LARGE, "not 10.0"),
        ("9.0", "float32", 8, (8, 8), LARGE, "bfloat16 and float16, not float32"),
        ("9.0", "bfloat16", 8, (8, 1), LARGE, "all 8 GPUs in one process, not 1"),
        ("9.0", "bfloat16", 4, (8, 8), LARGE, "P is 4, and JAX has 8: set CUDA"),
        ("9.0", "bfloat16", 1, (1, 1), LARGE, "at least 2. P is 1"),
        ("9.0", "bfloat16", 8, (8, 8), SMALL, "tiles do not divide"),
    ],
)
def test_another_call_has_a_reason(
    gpus, capability, dtype, num_ranks, numbers, shape, reason
):
    gpus(*numbers)
    assert reason in pallas.why_not(shape, dtype, num_ranks, capability)


def test_a_jax_without_the_barrier_has_no_kernel(gpus, monkeypatch):
    mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

    class CompilerParams:
        pass

    monkeypatch.setattr(mosaic_gpu, "CompilerParams", CompilerParams)
    monkeypatch.setattr(pallas, "why_not", lambda *arguments: None)
    reason = pallas.programs(LARGE, "bfloat16", Ranks(8))
    assert "without a barrier between the GPUs. Install jax 0.11.2" in reason


@pytest.fixture
def on_gpus(monkeypatch):
    """Sets `Ranks.platform` to "gpu", so that benchmarks treat CPU devices as GPUs."""
    monkeypatch.setattr(Ranks, "platform", "gpu")


def case_of_two_ranks(dtype="float32"):
    setup = Setup(Ranks(2), dtype, "xla", FastestDots())
    (case,) = linear.linear(COLUMN, setup, SMALL)
    return case


def test_a_case_on_cpus_does_not_mention_the_kernel():
    case = case_of_two_ranks()
    assert not case.notes
    assert cases.PALLAS not in {candidate.name for candidate in case.candidates}
    assert cases.PALLAS not in report.results_table(["bfloat16"], [case.op]).head()


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

    def set_programs(**found):
        monkeypatch.setattr(pallas, "programs", lambda *arguments: found)

    return set_programs


def fails(x, w):
    raise ValueError("exceeds available shared memory\nmore")


def test_the_fastest_kernel_is_a_column_of_the_table(on_gpus, substitute):
    substitute(a=peers.naive_column, b=peers.naive_column)
    case = case_of_two_ranks()
    assert case[cases.PALLAS].variant in ("a", "b")
    check_agreement(case)
    times = {c.name: [1e-3] * 3 for c in case.candidates} | {cases.PALLAS: [2e-3] * 3}
    table = report.results_table(["bfloat16"], ["all_gather_matmul"], "cuda")
    row = table.row(report.evaluate(case, report.Rounds(times, 0.0)))
    head = table.head().splitlines()[0]
    cells = dict(zip(*(map(str.strip, t.split("|")) for t in (head, row)), strict=True))
    assert cells["pallas"] == "2.00 ±0%"


def test_a_kernel_that_fails_is_a_note(on_gpus, substitute):
    substitute(a=fails, b=fails)
    (note,) = case_of_two_ranks().notes
    assert note.endswith("P=2: it failed: exceeds available shared memory")


def test_tune_times_the_kernel_but_does_not_choose_it(on_gpus, substitute):
    case = TunedKey("all_gather_matmul", 2, 64, 32, 48, "float32")
    choices = candidates(case, is_cuda=False)
    substitute(a=peers.naive_column, b=peers.naive_column)
    seconds, failed, compared = tune.measure(case, choices, rounds=1)
    assert set(seconds) == set(choices)
    assert not failed
    assert compared[cases.PALLAS] > 0
    substitute(a=fails, b=fails)
    _, failed, compared = tune.measure(case, choices[:1], rounds=1)
    assert failed == {cases.PALLAS: "it failed: exceeds available shared memory"}
    assert not compared
