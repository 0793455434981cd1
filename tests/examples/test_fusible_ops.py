import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"tp": 2, "steps": 11, "tokens": 32, "width": 32, "head-dim": 8, "layers": 1}


@pytest.mark.slow
def test_both_copies_learn_alike_and_the_plan_is_shown():
    program = ROOT / "examples/fusible_ops.py"
    done = subprocess.run(
        [sys.executable, str(program), *(f"--{k}={v}" for k, v in SMALL.items())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    plan, _, trained = done.stdout.partition("step ")
    assert plan.count("UserbuffersForwardLinear of") == 4
    assert "BackwardAddRMSNorm of 0-1" in plan
    assert " NO " not in plan
    losses = re.findall(r"loss (\S+) fused, (\S+) unfused", trained)
    assert len(losses) == 2
    for fused, unfused in losses:
        assert abs(float(fused) - float(unfused)) < 1e-3
    assert float(losses[1][0]) < 0.9 * float(losses[0][0])
    memory = dict(re.findall(r"^(fused|unfused) +\S+ +(\S+)$", trained, re.M))
    assert float(memory["fused"]) < float(memory["unfused"])
