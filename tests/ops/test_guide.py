import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_the_guide_runs_from_top_to_bottom():
    text = (ROOT / "docs/ops.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)
