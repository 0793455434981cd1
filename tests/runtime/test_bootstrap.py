"""The key-value store of `jax.distributed`, and which processes have exited."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

import jax_ub as ub
from jax_ub._src.runtime import bootstrap
from jax_ub._src.runtime.bootstrap import (
    JaxStore,
    Presence,
    join_job,
    open_rendezvous,
    publish_pid,
)
from jax_ub._src.tools.launch import supervisor
from jax_ub.errors import CommunicatorError, ConfigurationError, UnknownNameError


@pytest.mark.parametrize("backend", ["nccl", "gloo", "jx", "jax:localhost", 7])
def test_an_unknown_backend_is_rejected(backend):
    with pytest.raises(UnknownNameError, match="Known: 'jax', 'mpi'.*nccl"):
        ub.initialize_ub((8, 8), 1, bootstrap_backend=backend)
    assert not ub.is_ub_initialized()


@pytest.mark.parametrize("backend", ["file", "file:/shared"])
def test_the_file_backend_names_the_alternative(backend):
    text = r"was removed: .*jax\.distributed\.initialize\(\).*-m jax_ub launch"
    with pytest.raises(ConfigurationError, match=text):
        ub.initialize_ub((8, 8), 1, bootstrap_backend=backend)


@pytest.mark.parametrize("backend", [None, "jax"])
def test_one_process_needs_no_job(backend):
    ub.initialize_ub((8, 8), 1, bootstrap_backend=backend)


def test_a_missing_mpi4py_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install mpi4py"):
        ub.initialize_ub((8, 8), 1, bootstrap_backend="mpi")


def test_mpi_cannot_find_processes_after_jax_has_started(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    jax.devices()
    text = r'method="mpi4py"\) before anything else of JAX'
    with pytest.raises(ConfigurationError, match=text):
        ub.initialize_ub((8, 8), 1, bootstrap_backend="mpi")


def test_mpi_initializes_jax_distributed_once(monkeypatch):
    calls = []

    def initialize(**options):
        calls.append(options)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    stores = types.SimpleNamespace(write=lambda *_: None)
    monkeypatch.setattr(bootstrap, "JaxStore", lambda scope: stores)
    for _ in range(2):
        join_job("mpi")
    assert calls == [{"cluster_detection_method": "mpi4py"}]


class Unreachable:
    """A client whose coordinator has exited."""

    def key_value_set(self, key, text, allow_overwrite=False):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def key_value_try_get(self, key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def key_value_delete(self, key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")


class Empty(Unreachable):
    """A client whose coordinator has no messages."""

    def key_value_try_get(self, key):
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")


def test_an_unreachable_coordinator_is_named(monkeypatch):
    monkeypatch.setattr(bootstrap.distributed.global_state, "client", Unreachable())
    store = JaxStore("tp")
    text = "coordinator of jax.distributed.* does not respond: UNAVAILABLE.*it exited"
    with pytest.raises(CommunicatorError, match=text):
        store.write("key", "text")
    with pytest.raises(CommunicatorError, match=text):
        store.read("key")
    store.erase("key")  # nothing is left to erase


def test_a_missing_message_is_none(monkeypatch):
    monkeypatch.setattr(bootstrap.distributed.global_state, "client", Empty())
    assert JaxStore("tp").read("key") is None


def test_without_jax_distributed_there_is_no_rendezvous():
    text = r"Call jax\.distributed\.initialize\(\) first"
    with pytest.raises(CommunicatorError, match=text):
        open_rendezvous([0, 1], 1.0)


@pytest.fixture
def messages(monkeypatch):
    found: dict[str, str] = {}

    class Store:
        def __init__(self, scope):
            self.read, self.write = found.get, found.__setitem__

    monkeypatch.setattr(bootstrap, "JaxStore", Store)
    monkeypatch.setattr(bootstrap.distributed.global_state, "client", object())
    return found


def publish_as(monkeypatch, process):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: process)
        publish_pid()


def test_a_process_is_lost_once_it_has_exited(messages, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    publish_as(monkeypatch, 1)
    namespace, _, _ = json.loads(messages["1"])
    start = bootstrap._start_time(child.pid)
    messages["1"] = json.dumps([namespace, child.pid, start])
    presence = Presence()
    assert presence.lost(1) is None
    assert presence.lost(2) is None  # has published no PID
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert presence.lost(1) == f"(pid {child.pid}) died"  # a zombie
    child.communicate()
    assert presence.lost(1) == Presence().lost(1) == f"(pid {child.pid}) died"
    publish_as(monkeypatch, 1)  # restarted
    assert presence.lost(1) is None


def test_a_command_name_may_end_within_a_character():
    name = pathlib.Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("fourteen-bytesü".encode())  # the kernel cuts it to 15 bytes
    try:
        assert bootstrap._start_time(os.getpid()) is not None
        assert os.getpid() not in supervisor.descendants()
    finally:
        name.write_bytes(before)


def test_a_process_of_another_namespace_is_never_lost(messages, monkeypatch):
    publish_as(monkeypatch, 1)
    _, pid, start = json.loads(messages["1"])
    messages["1"] = json.dumps(["another host", pid, start + 1])
    assert Presence().lost(1) is None


def test_a_later_process_with_the_same_pid_is_another_one(messages, monkeypatch):
    publish_as(monkeypatch, 1)
    namespace, pid, start = json.loads(messages["1"])
    messages["1"] = json.dumps([namespace, pid, start - 1])
    assert Presence().lost(1) == f"(pid {pid}) died"


def test_without_a_job_nothing_is_written(messages, monkeypatch):
    monkeypatch.setattr(bootstrap.distributed.global_state, "client", None)
    publish_pid()
    assert not messages
