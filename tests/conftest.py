"""Sixteen CPU devices for every test, and enough threads to launch programs on them."""

import os

# jaxlib deadlocks with more launches in flight than its pool has threads (docs: NPROC).
os.environ.setdefault("NPROC", "32")

import jax
import pytest

import jax_ub

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)


@pytest.fixture(autouse=True)
def nothing_stays_initialized():
    yield
    jax_ub.destroy_ub()
