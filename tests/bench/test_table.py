import dataclasses

from jax_ub._src.tools.bench import cases, goals, table
from jax_ub._src.tools.bench.cases import Case, Memory
from jax_ub._src.tools.bench.results import evaluate
from jax_ub._src.tools.bench.statistics import Summary
from jax_ub._src.tools.bench.timing import Rounds
from jax_ub._src.tools.bench.workloads import Shape


def example(more=None):
    shape = Shape(512, 1024, 2816)
    memory = Memory(0, 2 << 20, "the gathered x [M, K]", 1 << 20, 512)
    case = Case(
        "all_gather_matmul", "", "bfloat16", 8, shape, shape.flops, [], memory=memory
    )
    seconds = {
        cases.OWN: [10e-3] * 3,
        cases.BEST: [14e-3] * 3,
        cases.NAIVE: [30e-3] * 3,
        cases.PLAIN: [9e-3] * 3,
        cases.LAUNCH: [1e-4] * 3,
        cases.LAUNCH_ONE: [1e-4] * 3,
        **(more or {}),
    }
    return evaluate(case, Rounds(seconds, 0.0))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_shows_time_speedups_and_shares():
    head = cells(table.result_head().splitlines()[0])
    line = dict(zip(head, cells(table.result_line(example())), strict=True))
    assert line["op"] == "all_gather_matmul"
    assert line["M x K x N"] == "512x1024x2816"
    assert line["time"] == "10 ms"
    assert line["GF/s"] == "295"
    assert line["xla_best"] == "1.40 ±0%"
    assert line["xla_ring"] == ""
    assert line["plain_gemm"] == "0.90"


def test_a_line_of_a_thread_count_shows_its_time_over_that_of_the_first():
    head = cells(table.threads_head().splitlines()[0])
    ratio = Summary(1.07, 0.04, 1.1)
    result = dataclasses.replace(example(), threads=64, over_first=ratio)
    line = dict(zip(head, cells(table.threads_line(result)), strict=True))
    assert line["threads"] == "64"
    assert line["time"] == "10 ms"
    assert line["over first"] == "1.07 ±2%"
    assert line["xla_best"] == "1.40 ±0%"
    assert line["plain_gemm"] == "0.90"


def test_cases_that_stayed_disturbed_are_named():
    calm = example()
    busy = dataclasses.replace(calm, elsewhere=0.25)
    name = "all_gather_matmul 512x1024x2816 bfloat16 P=8"
    assert table.disturbed([calm, busy]) == [f"{name}: 25% of the machine"]


def test_the_table_is_markdown():
    head, rule = table.result_head().splitlines()
    assert head.count("|") == rule.count("|") == table.result_line(example()).count("|")
    assert set(rule) == {"|", "-"}


def test_the_verdicts_say_reached_or_not():
    lines = table.verdict_table(goals.judge([example()]))
    text = {cells(line)[3]: cells(line)[-1] for line in lines[1:]}
    assert text["speed-up over xla_naive"] == "reached"
    assert text["time over the plain GEMM's"] == "reached"


def test_a_speed_up_stands_beside_its_limit():
    seconds = {cases.OWN: 16e-3, cases.BEST: 12e-3, cases.PEAK: 10e-3}
    result = example({name: [value] * 3 for name, value in seconds.items()})
    lines = table.verdict_table(goals.judge([result]))
    text = {cells(line)[3]: cells(line)[4:] for line in lines[1:]}
    assert text["speed-up over xla_naive"][1:] == ["1.88", "3", ">= 2.3", "NOT reached"]
    assert text["time over the plain GEMM's"][2] == ""
    over = [cells(line)[5:] for line in lines if "speed-up over xla_best" in line]
    assert over == [
        ["0.75", "1.2", ">= 1.3", "beyond this machine"],
        ["0.75", "1.2", ">= 0.95", "NOT reached"],
    ]
    assert cells(table.result_line(result))[-1] == "0.62"


def test_memory_is_shown_where_it_is_compared():
    (_, line) = table.memory_table([example()])
    assert cells(line)[4:] == [
        "0 B",
        "2.0 MiB",
        "512 B",
        "the gathered x [M, K]: 1.0 MiB",
    ]
    assert table.memory_table([]) == []


def test_durations_carry_their_unit():
    assert table.duration(3.456) == "3.46 us"
    assert table.duration(34567) == "34.6 ms"
