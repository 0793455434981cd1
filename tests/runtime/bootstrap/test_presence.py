"""Which processes have ended, by what they left in a store."""

import json
import os
import subprocess
import sys

import pytest

from jax_ub._src.runtime.bootstrap import presence
from jax_ub._src.runtime.bootstrap.presence import Presence


@pytest.fixture
def store(monkeypatch):
    notes: dict[str, str] = {}

    class KeyValueStore:
        def __init__(self, scope):
            self.read, self.write = notes.get, notes.__setitem__

    monkeypatch.setattr(presence, "JaxService", KeyValueStore)
    monkeypatch.setattr(presence.distributed.global_state, "client", object())
    return notes


def leave_note(store, process, pid):
    presence.enter(process)
    namespace, _, _ = json.loads(store[str(process)])
    store[str(process)] = json.dumps([namespace, pid, presence._start_of(pid)])


def test_a_process_is_lost_when_it_has_ended_and_not_before(store):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leave_note(store, 1, child.pid)
    known = Presence()
    assert known.lost(1) is None
    assert known.lost(2) is None  # has not entered
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert known.lost(1) == f"(pid {child.pid}) died"  # nobody has asked for its status
    child.communicate()
    assert known.lost(1) == Presence().lost(1) == f"(pid {child.pid}) died"
    presence.enter(1)  # started anew
    assert known.lost(1) is None


def test_a_process_of_another_namespace_is_not_judged(store):
    presence.enter(1)
    _, pid, start = json.loads(store["1"])
    store["1"] = json.dumps(["another host", pid, start + 1])
    assert Presence().lost(1) is None


def test_another_process_of_the_same_pid_is_not_taken_for_it(store):
    presence.enter(1)
    namespace, pid, start = json.loads(store["1"])
    store["1"] = json.dumps([namespace, pid, start - 1])
    assert Presence().lost(1) == f"(pid {pid}) died"


def test_outside_a_job_nothing_is_left(store, monkeypatch):
    monkeypatch.setattr(presence.distributed.global_state, "client", None)
    presence.enter(0)
    assert not store
