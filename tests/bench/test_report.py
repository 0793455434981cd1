import dataclasses
import pickle

from jax_ub._src.tools.bench import cases, report
from jax_ub._src.tools.bench.cases import Case, Memory
from jax_ub._src.tools.bench.report import evaluate
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.timing import Candidate, Rounds, Summary


def example():
    shape = Shape(512, 1024, 2816)
    memory = Memory(0, 2 << 20, 1 << 20, 512, 3 << 20)
    case = Case(
        "all_gather_matmul", "", "bfloat16", 8, shape, shape.flops, [], memory=memory
    )
    seconds = {
        cases.OWN: [10e-3] * 3,
        cases.BEST: [14e-3] * 3,
        cases.NAIVE: [30e-3] * 3,
        cases.PLAIN: [9e-3] * 3,
    }
    return evaluate(case, Rounds(seconds, 0.0))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def columns(*results):
    """Returns {title: cells of all results} of the table."""
    head, _, *rows = map(cells, report.table(results).splitlines())
    return dict(zip(head, zip(*rows, strict=True), strict=True))


def with_peers(**peers):
    """Returns the example with these speed-ups instead of its own."""
    return dataclasses.replace(
        example(), speedups={name: Summary(x, 0.1, x) for name, x in peers.items()}
    )


def test_a_line_shows_time_speedups_and_shares():
    found = columns(example(), with_peers(xla_ring=2.0))
    assert found["op"] == ("all_gather_matmul",) * 2
    assert found["M x K x N"] == ("512x1024x2816",) * 2
    assert found["time"] == ("10 ms",) * 2
    assert found["GF/s"] == ("295",) * 2
    assert found["xla_best"] == ("1.40 ±0%", "")
    assert found["xla_ring"] == ("", "2.00 ±5%")
    assert found["plain_gemm"] == ("0.90",) * 2


def test_a_number_of_threads_is_a_column_between_peers_and_limits():
    found = columns(with_peers(**{"jax_ub@64": 1.07, "pallas": 2.0}))
    assert found["jax_ub@64"] == ("1.07 ±5%",)
    assert list(found)[-3:] == ["pallas", "jax_ub@64", "plain_gemm"]


def test_columns_without_values_are_left_out():
    assert list(columns(example())) == [
        *("op", "P", "dtype", "M x K x N", "time", "spread", "GF/s"),
        *("xla_best", "xla_naive", "plain_gemm"),
    ]
    fp8 = with_peers(bf16=1.0, xla_f8=2.0, xla_qdq=1.5)
    assert {"bf16", "xla_f8", "xla_qdq"} < set(columns(fp8))
    assert "xla_best" not in columns(fp8)
    assert {"xla_best", "bf16"} < set(columns(example(), fp8))


def test_a_job_has_its_number_of_processes_as_a_column():
    case = dataclasses.replace(example().case, num_processes=8)
    found = columns(dataclasses.replace(example(), case=case))
    assert found["processes"] == ("8",)
    assert "P" not in found


def test_disturbed_cases_are_listed():
    calm = example()
    busy = dataclasses.replace(calm, elsewhere=0.25)
    name = "all_gather_matmul 512x1024x2816 bfloat16 P=8"
    lines = report.sections([calm, busy], []).splitlines()
    assert lines[-1] == f"{name}: others used 25% of the machine, spread 0%"
    assert "The ratios of these cases are not valid" in lines[-3]
    assert [one.as_json()["is_disturbed"] for one in (calm, busy)] == [False, True]


def test_times_that_vary_are_disturbed():
    own = Summary(median=10e3, spread=0.45, best=9e3)
    varying = dataclasses.replace(example(), times_us={cases.OWN: own})
    assert varying.as_json()["is_disturbed"]
    assert "others used 0% of the machine, spread 45%" in report.sections([varying], [])


def test_low_rates_have_two_digits():
    slow = dataclasses.replace(
        example(), times_us={cases.OWN: Summary(median=10e6, spread=0.0, best=10e6)}
    )
    assert columns(slow)["GF/s"] == ("0.3",)


def test_the_table_is_markdown():
    head, rule, row = report.table([example()]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert set(rule) == {"|", "-"}


def test_the_memory_table_lists_cases_with_memory():
    line = report.sections([example()], []).splitlines()[-1]
    assert cells(line)[4:] == ["0 B", "2.0 MiB", "3.0 MiB", "64 B", "1.0 MiB"]
    assert report.sections([], []) == ""


def test_results_keep_no_programs():
    case = dataclasses.replace(
        example().case, candidates=[Candidate(cases.BEST, lambda: None, [1])]
    )
    found = evaluate(case, Rounds({cases.OWN: [1.0], cases.BEST: [2.0]}, 0.0))
    assert "candidates" not in found.as_json()
    assert pickle.loads(pickle.dumps(found)).as_json() == found.as_json()
