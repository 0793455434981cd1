"""Commands, code, figures, links and names in documentation and comments are right."""

import itertools
import math
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import jax_ub

TOP = pathlib.Path(__file__).parents[1]
README = (TOP / "README.md").read_text()
FUNCTIONS = (TOP / "docs/functions.md").read_text()
PAGES = [
    TOP / "README.md",
    TOP / "CHANGELOG.md",
    *sorted(TOP.glob(".github/*.md")),
    *sorted(TOP.glob("docs/**/*.md")),
]


def blocks(mark):
    """Returns the fenced blocks that follow the comment `<!-- mark -->`."""
    return re.findall(rf"<!-- {mark} -->\n```\w*\n(.*?)```", README, re.DOTALL)


def test_the_code_of_the_readme_runs():
    set_up, example = blocks("run by tests/test_readme.py")
    assert sum(map(bool, example.splitlines())) <= 10
    program = set_up + example
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == program.rsplit("#", 1)[1].strip() == "True"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("name", ["example", "tests"])
def test_each_command_of_the_readme_is_one_line(name):
    (command,) = blocks(f"command: {name}")
    assert len(command.splitlines()) == 1


def test_the_figures_are_the_means_of_the_report():
    report = (TOP / "docs/bench/zen5.md").read_text()
    rows = re.findall(
        r"^\| (\w+) +\| (\d+) \| (bf16|f32) +\|(?:[^|]*\|){4} +([\d.]+) ±", report, re.M
    )
    ops = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
    for op in (*ops, "linear_pair"):
        means = []
        for dtype, num_ranks in itertools.product(("bf16", "f32"), "248"):
            speedups = [float(x) for *key, x in rows if key == [op, num_ranks, dtype]]
            means.append(f"{math.prod(speedups) ** (1 / len(speedups)):.2f}")
        row = f" | {' | '.join(means)} |\n"
        assert row in README, op
        assert row in (TOP / "docs/bench/README.md").read_text(), op


def test_every_documented_function_is_public():
    table = FUNCTIONS.partition("## Functions")[2].partition("##")[0]
    names = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
    assert names
    assert [name for name in names if not hasattr(jax_ub, name)] == []


def test_every_environment_variable_is_documented_and_read():
    settings = (TOP / "jax_ub/_src/runtime/settings.py").read_text()
    documented = set(re.findall(r"^\| `(JAX_UB_\w+)`", FUNCTIONS, re.MULTILINE))
    assert documented == set(re.findall(r"\bJAX_UB_\w+", settings))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_links_and_paths_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    # Paths in the tree that a page names in backticks.
    paths = re.findall(r"`((?:jax_ub|csrc|tests|examples|docs)/[\w./]+)`", text)
    missing += [path for path in paths if not (TOP / path).exists()]
    assert missing == []


def test_names_on_the_page_for_transformer_engine_exist():
    text = (TOP / "docs/transformer_engine.md").read_text()
    rows = re.findall(r"^\|.*\| (.*) \|$", text, re.MULTILINE)
    names = re.findall(r"`((?:ub|ops|jax_ub)\.[\w.]+)[`(]", "\n".join(rows))
    assert len(names) > 15
    for name in names:
        package, _, path = name.partition(".")
        found = {"ub": "jax_ub", "ops": "jax_ub.ops", "jax_ub": "jax_ub"}[package]
        assert pkgutil.resolve_name(f"{found}.{path}") is not None


def test_comments_name_what_the_engine_defines():
    """A comment such as "`Method` in csrc/schedule/schedule.h" names both correctly."""
    named = []
    for path in sorted(TOP.glob("jax_ub/**/*.py")):
        text = re.sub(r"\n\s*#", "", path.read_text())
        named += re.findall(r"(\w+)`? in (csrc/[\w/.*]*\w)", text)
    assert len(named) > 2
    for name, pattern in named:
        found = [*TOP.glob(pattern), *TOP.glob(f"{pattern}/*")]
        sources = [file.read_text() for file in found if file.is_file()]
        assert any(re.search(rf"\b{name}\b", source) for source in sources), name
