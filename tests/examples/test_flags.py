"""Errors of the examples for invalid flags, and the values that they suggest."""

import importlib
import re
import subprocess
import sys

import jax
import pytest

fusible_ops = importlib.import_module("fusible_ops")
multihost = importlib.import_module("multihost")
train_lm = importlib.import_module("train_lm")


def flags_of(program, text, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example.py", *text.split()])
    return program.parse_flags()


WRONG_FLAGS_OF_TRAIN_LM = [
    ("--tp 3", "--heads 4 is no multiple of --tp 3.*give --heads 6"),
    ("--heads 3 --tp 1", "--d-model 256 is no multiple of --heads 3"),
    ("--microbatches 3", "--batch 4 is no multiple of --microbatches 3"),
    ("--dp 4 --microbatches 2", "--dp 4 replicas cannot share: give --batch 8"),
    ("--steps 0", "--steps 0 is too small"),
    ("--d-model 12", "give --d-model 24"),
    ("--resume", "--resume needs the --checkpoint-dir"),
    ("--checkpoint-dir /dev/null", "--checkpoint-dir /dev/null is a file: give a"),
    ("--method rings", "invalid choice: 'rings'"),
    ("--fp8 delayed current --checkpoint-dir x", "saves one copy of the model: gi"),
    ("--fp8 mxfp8 --d-model 64 --tp 4", "32 x --tp 4.*give --d-model 128"),
    ("--tp 12 --heads 12 --d-model 48 --seq-len 96", "--tp 12 does not divide"),
]


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [
        (fusible_ops, "--tp 0", "--tp 0 is not positive"),
        (fusible_ops, "--head-dim -8", "--head-dim -8 is not positive"),
        (fusible_ops, "--tp 3", "--tokens 256 is no multiple of 3.*give 258"),
        (fusible_ops, "--tp 16", "--width 256 is no multiple of 512.*give 512"),
        (multihost, "--tp 0", "--tp 0: give at least 1"),
        (multihost, "--seq-len 0", "--seq-len 0: give at least 1"),
        *((train_lm, *case) for case in WRONG_FLAGS_OF_TRAIN_LM),
    ],
)
def test_wrong_flags_are_rejected(program, text, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        flags_of(program, text, monkeypatch)
    assert caught.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


# In a new process, since jax may be initialized in this one.
@pytest.mark.slow
def test_error_without_a_job_says_how_to_start_one(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    ended = subprocess.run(
        [sys.executable, multihost.__file__, "--num-processes", "1"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert re.search("belongs to no job: .* --coordinator, ", ended.stderr)
    assert "Traceback" not in ended.stderr


def test_fewer_devices_than_ranks_are_rejected(monkeypatch):
    num, wanted = len(jax.devices()), 4 * len(jax.devices())
    text = f"--tp {wanted} --tokens {wanted} --width {wanted} --head-dim 1"
    flags = flags_of(fusible_ops, text, monkeypatch)
    with pytest.raises(SystemExit, match=f"--tp {wanted} .* but jax has {num}: give"):
        fusible_ops.Model(flags)


@pytest.mark.parametrize(
    ("text", "given", "num_devices"),
    [
        ("", {}, "4"),
        ("--tp 2 --dp 2", {"JAX_NUM_CPU_DEVICES": "8"}, "8"),
        ("--distributed", {}, None),  # one in each process, for example under Slurm
    ],
)
def test_only_a_process_without_a_job_has_all_cpu_devices(
    text, given, num_devices, monkeypatch
):
    flags = flags_of(train_lm, text, monkeypatch)
    monkeypatch.setattr(train_lm.os, "environ", dict(given))
    train_lm.prepare_jax(flags)
    assert train_lm.os.environ.get("JAX_NUM_CPU_DEVICES") == num_devices


@pytest.mark.slow
def test_one_step_is_enough_for_a_report(monkeypatch, capsys):
    text = "--steps 1 --tp 2 --tokens 32 --width 32 --head-dim 8 --layers 1"
    flags = flags_of(fusible_ops, text, monkeypatch)
    fusible_ops.train(fusible_ops.Model(flags), flags)
    assert "unfused / fused: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "tp", "message"),
    [
        ("--seq-len 30", 4, "--seq-len 30 does not divide into the 4.*give 32, or"),
        ("--d-model 30 --seq-len 32", 16, "--d-model 30 does not divide.*give 32, or"),
    ],
)
def test_sizes_that_do_not_divide_are_rejected(text, tp, message, monkeypatch):
    flags = flags_of(multihost, text, monkeypatch)
    with pytest.raises(SystemExit, match=message):
        multihost.check_sizes(flags, tp)
    multihost.check_sizes(flags, 2)


def hosts_of(sizes, monkeypatch):
    devices = iter(jax.devices())
    hosts = [[next(devices) for _ in range(size)] for size in sizes]
    monkeypatch.setattr(multihost, "devices_by_host", lambda: hosts)
    return hosts


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((2, 2), (2, 2)), ((4, 6), (5, 2)), ((2, 1), (3, 1)), ((3,), (1, 3))],
)
def test_a_model_is_shared_by_as_many_devices_as_all_hosts_allow(
    sizes, shape, monkeypatch, capsys
):
    hosts = hosts_of(sizes, monkeypatch)
    mesh = multihost.make_mesh(None)
    assert mesh.devices.shape == shape
    host_of = {device: number for number, host in enumerate(hosts) for device in host}
    assert all(len({host_of[device] for device in row}) == 1 for row in mesh.devices)
    has_hint = "if all had as many, more could share a model" in capsys.readouterr().out
    assert has_hint == (len(set(sizes)) > 1)


def test_devices_that_do_not_divide_are_rejected_with_a_suggestion(monkeypatch):
    hosts_of((4, 6), monkeypatch)
    with pytest.raises(SystemExit, match=r"--tp 4 .*\[4, 6\]: give 2 or a divisor"):
        multihost.make_mesh(4)
    assert multihost.make_mesh(1).devices.shape == (10, 1)
