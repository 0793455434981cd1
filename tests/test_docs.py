"""The programs on the pages of docs/ run, and the index lists every page."""

import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# Pages whose Python blocks are one program. Blocks of other pages are fragments.
PROGRAMS = ["equinox", "flax", "megatron", "ops", "quickstart", "transformer_engine"]


def blocks(page):
    """Returns the comment before each Python block of a page ("" if none), and it."""
    text = (DOCS / f"{page}.md").read_text()
    pattern = r"(?:<!-- ([^>]*) -->\n)?```python\n(.*?)```"
    return re.findall(pattern, text, re.DOTALL)


def run(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_program_of_the_page_runs(page, tmp_path):
    program = []
    for mark, block in blocks(page):
        if not mark.startswith("not run"):
            program.append(block)
    assert program
    run("-c", "\n".join(program), cwd=tmp_path)


@pytest.mark.slow
def test_the_quickstart_runs_in_two_processes(tmp_path):
    (_, one), (_, table), (mark, several) = blocks("quickstart")
    assert mark.startswith("not run")
    in_one_process = one[one.index("jax.config") :].partition("\n\n")[0] + "\n"
    assert "set_mesh" in in_one_process
    (tmp_path / "quickstart.py").write_text(
        one.replace(in_one_process, several) + table
    )
    text = (DOCS / "quickstart.md").read_text()
    (command,) = re.findall(r"^python -m jax_ub launch (.*)$", text, re.MULTILINE)
    printed = run("-m", "jax_ub", "launch", *command.split(), cwd=tmp_path)
    assert printed.count("step: 5 of 5 overlapped") == 2


def test_the_index_lists_every_page_once():
    lists = re.findall(
        r"```{toctree}.*?\n\n(.*?)```", (DOCS / "index.md").read_text(), re.S
    )
    listed = "".join(lists).split("\n")
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in listed if line]
    pages = [str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")]
    assert sorted([*names, "index"]) == sorted(pages)
