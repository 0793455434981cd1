"""Connections of initialize_ub on GPUs, with a fake CUDA engine."""

import types

import pytest
from cuda_programs import StandIn

import jax_ub as ub
from jax_ub._src.runtime import (
    communicators,
    connection_attempt,
    cpu_engine,
    cuda_engine,
)
from jax_ub._src.runtime.communicators import DeviceGroups, connections
from jax_ub.errors import CommunicatorError

# Two groups that span two processes, and one group inside each process.
GROUPS = ((0, 4), (1, 5), (2, 3), (6, 7))
INTRODUCTION = {"address": "there", "token": 7, "capabilities": {"vmm": "yes"}}


class Communicator(types.SimpleNamespace):
    failure = None
    size_bytes = 1000
    closed = False

    def close(self):
        self.closed = True


class Engine(StandIn):
    def __init__(self):
        super().__init__(made=[], offered=[], fails={})

    def endpoint(self, ordinals, slots_bytes, host):
        self.offered.append((ordinals, slots_bytes))
        return types.SimpleNamespace(
            address="here", token=5, capabilities={"vmm": "yes"}
        )

    def why_not_connected(self, processes, capabilities):
        assert {0, 1} == set(capabilities)
        return ""

    def _make(self, devices, **options):
        if devices[0] in self.fails:
            raise self.fails[devices[0]]
        made = Communicator(devices=devices, **options)
        self.made.append(made)
        return made

    def connect(self, endpoint, **options):
        assert endpoint.address == "here"
        return self._make(**options)

    connect_in_process = _make

    def release_in_process(self):
        pass


class ProcessAllGather:
    """A fake all-gather whose process 1 sends the values in `said` in order."""

    def __init__(self, *said):
        self.said = list(said)

    def gather(self, value, error=None, *, timeout_s=None):
        if error is not None:
            raise error
        if not self.said:
            raise ub.errors.TimeoutError("process 1 did not take part")
        return {0: value, 1: {**value, **self.said.pop(0)}}


class OneProcess:
    """A fake all-gather of one process."""

    def gather(self, value, error=None, *, timeout_s=None):
        if error is not None:
            raise error
        return {0: value}


def introduced(host="here"):
    return {
        "endpoints": {
            key: {**INTRODUCTION, "host": host} for key in ("(0, 4)", "(1, 5)")
        }
    }


@pytest.fixture
def fake_engine(monkeypatch):
    engine_of_gpus = Engine()
    monkeypatch.setattr(cuda_engine, "load", lambda: engine_of_gpus)
    monkeypatch.setattr("jax_ub._src.runtime.hosts.identity", lambda: "here")
    yield engine_of_gpus
    communicators.disconnect_all_but(())


def device_groups(**changes):
    fields = {
        "groups": GROUPS,
        "process_of": {i: i // 4 for i in range(8)},
        "process": 0,
        "platform": "cuda",
        "capacity": 1000,
        "num_slots": 10,
        "name": "test",
        "ordinals": {i: 10 + i for i in range(4)},
    }
    return DeviceGroups(**{**fields, **changes})


def connect(*rounds, **changes):
    connection_attempt.connect(device_groups(**changes), ProcessAllGather(*rounds), {})
    return {one.group: one for one in connections()}


def test_groups_in_one_process_have_heaps_too(fake_engine):
    found = connect(introduced(), {})
    assert set(found) == set(GROUPS)
    size_bytes = device_groups().call_bytes
    assert fake_engine.offered == [([10], size_bytes), ([11], size_bytes)]
    first, second, inside = fake_engine.made
    assert (first.devices, first.processes, first.process) == ([0, 4], [0, 1], 0)
    assert (first.addresses, first.tokens) == ({1: "there"}, {1: 7})
    assert first.capabilities == {0: {"vmm": "yes"}, 1: {"vmm": "yes"}}
    assert second.devices == [1, 5]
    assert (inside.devices, inside.ordinals) == ([2, 3], [12, 13])
    assert inside.slots_bytes == device_groups().call_bytes
    assert found[6, 7].communicator is None
    assert all(one.reason is None for one in found.values())
    # Also a process without a rank in the group lowers its programs for it.
    assert len({one.generation for one in found.values()}) == 1


def test_only_processes_of_the_same_host_are_connected_by_socket(fake_engine):
    connect(introduced(host="there"), {})
    first = fake_engine.made[0]
    assert (first.addresses, first.tokens) == ({}, {})
    assert set(first.capabilities) == {0, 1}


def test_incompatible_capabilities_are_the_reason(fake_engine, monkeypatch):
    monkeypatch.setattr(
        fake_engine, "why_not_connected", lambda processes, capabilities: "no P2P"
    )
    found = connect(introduced(), {})
    assert found[0, 4].reason == found[1, 5].reason == "no P2P"
    assert found[2, 3].reason is None
    assert [one.devices for one in fake_engine.made] == [[2, 3]]


def test_a_connection_that_fails_in_this_process_is_the_reason(fake_engine):
    fake_engine.fails[0] = NotImplementedError("cuMemMap: no")
    fake_engine.fails[2] = NotImplementedError("no peer access")
    found = connect(introduced(), {})
    assert found[0, 4].reason == "cuMemMap: no"
    assert found[2, 3].reason == "no peer access"
    assert found[1, 5].communicator is fake_engine.made[0]


def test_a_connection_that_fails_elsewhere_is_closed_here(fake_engine):
    found = connect(introduced(), {"(0, 4)": "cuMemMap: no"})
    assert found[0, 4].reason == "cuMemMap: no"
    assert found[0, 4].communicator is None
    assert [one.closed for one in fake_engine.made] == [True, False, False]


def test_a_failure_leaves_nothing_behind(fake_engine):
    fake_engine.fails[1] = RuntimeError("CommunicatorError: process 1 died")
    with pytest.raises(CommunicatorError, match="process 1 died"):
        connect(introduced(), {})
    assert all(one.closed for one in fake_engine.made)
    assert not connections()


def test_a_process_that_does_not_report_its_outcome_leaves_nothing_behind(fake_engine):
    with pytest.raises(ub.errors.TimeoutError, match="did not take part"):
        connect(introduced())
    assert [one.closed for one in fake_engine.made] == [True, True, True]
    assert not connections()


def test_one_process_creates_and_destroys_its_heaps(fake_engine):
    alone = device_groups(groups=((2, 3), (1,)), process_of=dict.fromkeys(range(4), 0))
    connection_attempt.connect(alone, OneProcess(), {})
    (made,) = fake_engine.made
    assert (made.devices, made.ordinals) == ([2, 3], [12, 13])
    communicators.disconnect_all_but(())
    assert made.closed
    fake_engine.fails[2] = RuntimeError("CommunicatorError: cuMemCreate: out of memory")
    with pytest.raises(CommunicatorError, match="out of memory"):
        connection_attempt.connect(alone, OneProcess(), {})
    assert not connections()


def test_check_communicators_raises_failures(fake_engine):
    connect(introduced(), {})
    ub.check_communicators()
    fake_engine.made[0].failure = "CommunicatorError: rank 1 died"
    with pytest.raises(CommunicatorError, match=r"^devices \[0, 4\]: rank 1 died"):
        ub.check_communicators()
    fake_engine.made[0].failure = "rank 0 waited 3 s for rank 1"
    with pytest.raises(ub.errors.TimeoutError, match="waited 3 s"):
        ub.check_communicators()


def test_a_cpu_needs_no_connection_inside_a_process(monkeypatch):
    monkeypatch.setattr(cpu_engine, "load", lambda: pytest.fail("asked for an engine"))
    process_of = dict.fromkeys(range(4), 0)
    groups = device_groups(groups=((2, 3),), process_of=process_of, platform="cpu")
    connection_attempt.connect(groups, OneProcess(), {})
    assert not connections()


def test_a_missing_engine_in_this_process_is_the_reason(fake_engine, monkeypatch):
    monkeypatch.setattr(cuda_engine, "why_not", lambda: "no nvcc")
    found = connect(introduced(), {})
    assert found[0, 4].reason == "process 0 cannot connect: no nvcc"
    assert found[2, 3].reason == "no nvcc"
    assert not fake_engine.made and not fake_engine.offered


def test_a_missing_engine_in_another_process_is_the_reason(fake_engine):
    without = {
        "endpoints": {key: {"why_not": "no nvcc"} for key in ("(0, 4)", "(1, 5)")}
    }
    found = connect(without, {})
    assert (
        found[0, 4].reason == found[1, 5].reason == "process 1 cannot connect: no nvcc"
    )
    assert [one.devices for one in fake_engine.made] == [[2, 3]]
