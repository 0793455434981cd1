"""Sixteen CPU devices for every test, and enough threads to launch programs on them.

In several processes (`layouts.py`) the launcher says how many devices each has.
"""

import os
import random
import sys

# jaxlib deadlocks with more launches in flight than its pool has threads (docs: NPROC).
os.environ.setdefault("NPROC", "32")
# Compiling takes most of the tests' time. CI runs them at XLA's own level as well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import layouts
import pytest

import jax_ub
from jax_ub._src.runtime import initialize_args

jax.config.update("jax_platforms", "cpu")
if layouts.LAYOUT is None:
    jax.config.update("jax_num_cpu_devices", 16)
else:
    jax.distributed.initialize()


STATUS = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def nothing_stays_initialized():
    yield
    jax_ub.destroy_ub()


@pytest.fixture
def fp8_buffers(monkeypatch):
    """Lets `initialize_ub` make overlaps of FP8 operands, which no call can use yet."""
    monkeypatch.setattr(initialize_args, "reject_fp8", lambda given, fix: None)


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[STATUS] = exitstatus


def pytest_unconfigure(config):
    # A process that failed would wait for the others, to end all at once, and they for
    # it. All has been reported here.
    if layouts.LAYOUT is not None and (status := config.stash.get(STATUS, 0)):
        sys.stdout.flush()
        os._exit(int(status))


def pytest_collection_modifyitems(items):
    """Takes the part of the tests that `layouts.PART` asks for, in every process."""
    if layouts.PART is None:
        return
    part, num_parts = map(int, layouts.PART.split("/"))
    # Shuffled, so that no parameter falls into one part only.
    order = random.Random(0).sample(range(len(items)), len(items))
    items[:] = [items[i] for i in sorted(order[part::num_parts])]
