"""Sixteen CPU devices for every test, and enough threads to launch programs on them.

In several processes (`layouts.py`), the launcher sets the number of devices of each.
"""

import gc
import os
import random
import signal
import sys

# jaxlib deadlocks with more launches in flight than its pool has threads (docs: NPROC).
os.environ.setdefault("NPROC", "32")
# Compiling takes most of the tests' time. CI also runs them at XLA's default level.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import layouts
import pytest
from cuda_programs import StandIn
from programs import cache_options

import jax_ub
from jax_ub._src import lowering_log
from jax_ub._src.runtime import cuda_engine

jax.config.update("jax_platforms", "cpu")
if layouts.LAYOUT is None:
    jax.config.update("jax_num_cpu_devices", 16)
else:
    jax.distributed.initialize()


# nohup and background jobs of a shell ignore these signals, and programs that a test
# starts would inherit that. A handler that does nothing is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

STATUS = pytest.StashKey[int]()


def pytest_configure(config):
    # Other workers and later runs load the programs instead of compiling them.
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    if cache and layouts.LAYOUT is None:
        for name, value in cache_options(cache.mkdir("xla")).items():
            jax.config.update(name, value)


@pytest.fixture(autouse=True)
def nothing_stays_initialized():
    lowering_log._WARNED.clear()
    yield
    jax_ub.destroy_ub()


@pytest.fixture
def engine(monkeypatch):
    """Replaces the CUDA engine by a stand-in, and returns it."""
    engine = StandIn()
    monkeypatch.setattr(cuda_engine, "load", lambda: engine)
    return engine


# Garbage collections need not traverse the objects of all modules and tests.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 20)
    gc.enable()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[STATUS] = exitstatus


def pytest_unconfigure(config):
    # At exit, a failed process waits for the others, and the others wait for
    # it. All results have been reported at this point.
    if layouts.LAYOUT is not None and (status := config.stash.get(STATUS, 0)):
        sys.stdout.flush()
        os._exit(int(status))


def pytest_collection_modifyitems(items):
    """Selects the same part of the tests in every process, `layouts.PART`."""
    if layouts.PART is None:
        return
    part, num_parts = map(int, layouts.PART.split("/"))
    # Shuffled, so that every part has tests with every parameter.
    order = random.Random(0).sample(range(len(items)), len(items))
    items[:] = [items[i] for i in sorted(order[part::num_parts])]
