"""Queries and releases of a process that has made no engine."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow


def run(script):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_destroy_ub_needs_no_thread():
    # Only root may change the user, and root is exempt from the limit.
    run("""
        import os, resource, jax
        import jax_ub as ub
        from jax_ub._src.runtime import cpu_engine
        cpu = cpu_engine.load()
        destroy_ub = ub.destroy_ub  # imported here: other users may not read the file
        jax.devices()
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        destroy_ub()
        destroy_ub("tp")
        assert not cpu.has_engine()
    """)


def test_queries_and_releases_create_no_engine():
    run("""
        import os
        import jax_ub as ub
        from jax_ub._src.runtime import cpu_engine
        cpu = cpu_engine.load()
        assert cpu.num_threads() == cpu.default_num_threads()
        assert 1 <= cpu.num_threads() <= len(os.sched_getaffinity(0))
        assert cpu.cpu_set() == []
        assert cpu.counters()["slot_bytes"] == 0
        assert cpu.read_trace()["calls"] == []
        cpu.stop_trace()
        cpu.release_slots()
        cpu.isas(), cpu.isa(), cpu.targets(), cpu.call_site_type()
        cpu.endpoint()
        assert not ub.is_ub_initialized()
        assert not ub.fallbacks()
        ub.check_communicators()
        ub.destroy_ub()
        assert not cpu.has_engine()
    """)
