"""The code and commands on the pages of docs/ run, and the index lists every page."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jax_ub import __main__

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# Pages whose Python blocks are one program.
PROGRAMS = [
    *("equinox", "flax", "fp8", "fsdp", "initialize_ub", "megatron", "ops"),
    *("quickstart", "retrofit", "transformer_engine", "which_api", "write_model"),
]
# Each block of the other pages is run after these lines, and what its page needs.
SETUP = """
import os
os.environ.setdefault("NPROC", "32")
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
import jax_ub as ub
x, w = np.ones((8, 64), np.float32), np.ones((64, 64), np.float32)
"""
MESH = """
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("tp",))
"""
FRAGMENTS = {
    "explain": "params, batch, loss = w, x, lambda w, x: jnp.sum(x @ w)",
    "trace": "step, state = jnp.sin, x",
    "tune": f"""{MESH}
from jax_ub._src.runtime import tuned_file
tuned_file.write("tuned.json", {{tuned_file.environment(): {{}}}})""",
}
# Pages whose blocks other tests run.
ELSEWHERE = {
    "maxtext": "tests/retrofit/test_maxtext.py",
    "processes": "test_the_page_about_processes_runs_in_two_processes",
}


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


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_program_of_the_page_runs(page, tmp_path):
    program = []
    for mark, block in blocks(page):
        if not mark.startswith("not run"):
            program.append(block)
    assert program
    run("-c", "\n".join(program), cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", FRAGMENTS)
def test_the_fragments_of_the_page_run(page, tmp_path):
    program = f"{SETUP}\n{FRAGMENTS[page]}\ngiven = dict(globals())\n"
    for _, block in blocks(page):
        program += f"exec({block!r}, dict(given))\n"
    run("-c", program, cwd=tmp_path)


def test_the_code_of_every_page_is_run():
    pages = {page.stem for page in DOCS.glob("*.md") if blocks(page.stem)}
    assert pages == {*PROGRAMS, *FRAGMENTS, *ELSEWHERE}


def test_the_commands_of_every_page_have_known_options(monkeypatch):
    for name in __main__._COMMANDS:
        module = __main__._module_of(name)
        function = "run" if name == "launch" else "command"
        monkeypatch.setattr(module, function, lambda given: 0)
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    commands = re.findall(r"python -m jax_ub ([a-z]+ [^\n`#|]+)", text)
    assert len(commands) > 30
    for command in commands:
        assert __main__.main(shlex.split(command)) == 0, command


@pytest.mark.slow
def test_the_page_about_processes_runs_in_two_processes(tmp_path):
    (_, begin), (_, end) = blocks("processes")
    program = f"{begin}\nimport jax.numpy as jnp\nstep, state = jnp.sin, jnp.ones(3)\n"
    program += f"{end}print(ub.fallbacks())"
    (tmp_path / "train.py").write_text(program)
    launch = ["launch", "-n", "2", "--devices-per-process", "4", "train.py"]
    assert run("-m", "jax_ub", *launch, cwd=tmp_path).count("()") == 2


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
