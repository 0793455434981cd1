"""Connections of initialize_ub, in real processes under the launcher."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import pytest

import jax_ub
from jax_ub._src.runtime import communicators, connection_attempt, cpu_engine, hosts
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES, Connection, DeviceGroups
from jax_ub._src.runtime.transports import CpuTransportSetup, transport_setup_of
from jax_ub.errors import CommunicatorError, ConfigurationError, TimeoutError

HERE = pathlib.Path(__file__).parent
ROOT = pathlib.Path(jax_ub.__file__).parents[1]


def launched(program, *options, **variables):
    """Returns the lines that all processes of a successful program print."""
    done = subprocess.run(
        [sys.executable, "-m", "jax_ub", "launch", "-n", "2", "--devices-per-process"]
        + ["2", *options, str(HERE / program)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_UB_TIMEOUT_S": "120",
            **variables,
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_two_processes_connect_or_fail_together(tmp_path):
    lines = launched("in_two_processes.py", UB_TEST_FOLDER=str(tmp_path))
    program = (HERE / "in_two_processes.py").read_text()
    names = [one.split("(")[0] for one in program.split("\ndef ")[1:]]
    scenarios = set(names) - {"raises", "initialize", "put", "product"}
    for process in (0, 1):
        for name in scenarios:
            assert f"[{process}] passed {name}" in lines


@pytest.mark.slow
def test_groups_over_two_hosts_run_plain_jax_with_the_reason():
    lines = launched("over_two_hosts.py", "--hosts", "2")
    assert {f"[{process}] passed over_two_hosts" for process in (0, 1)} <= set(lines)


def device_groups(**changes):
    fields = {
        "groups": ((0, 1), (2, 3)),
        "process_of": {0: 0, 1: 0, 2: 0, 3: 1},
        "process": 0,
        "platform": "cpu",
        "capacity": 1000,
        "num_slots": 10,
        "name": "test",
    }
    return DeviceGroups(**{**fields, **changes})


def test_only_groups_over_several_processes_need_a_connection():
    assert CpuTransportSetup(device_groups()).groups() == [(2, 3)]
    assert device_groups().processes_of((2, 3)) == (0, 1)
    assert device_groups().num_local_ranks == 3
    assert device_groups().any_spans_processes
    assert not device_groups(groups=((0, 1),)).any_spans_processes


def test_a_rank_shares_eight_bytes_per_element_plus_alignment():
    slack = device_groups(capacity=0).call_bytes
    assert device_groups().call_bytes == slack + 8 * 1000
    assert slack >= 64 * 1024


def test_heaps_of_any_capacity_fit_a_one_shot_all_reduce():
    small, slack = device_groups(platform="cuda"), device_groups(capacity=0).call_bytes
    assert small.call_bytes == slack + ONE_SHOT_BYTES
    large = {"capacity": ONE_SHOT_BYTES}
    assert (
        device_groups(platform="cuda", **large).call_bytes
        == device_groups(**large).call_bytes
    )


class Alone:
    """A fake all-gather that no other process joins."""

    def gather(self, value, error=None, *, timeout_s=None):
        raise TimeoutError("process 1 did not take part")


def test_a_missing_process_leaves_no_connection():
    with pytest.raises(TimeoutError, match="did not take part"):
        connection_attempt.connect(device_groups(), Alone(), {})
    assert not communicators.connections()


def know(monkeypatch, *connections):
    known = {connection.key: connection for connection in connections}
    monkeypatch.setattr(communicators, "_CONNECTIONS", known)


def test_connections_of_gpus_do_not_apply_to_cpu_devices_with_their_ids(monkeypatch):
    know(monkeypatch, Connection((0, 1), "cuda", (0, 0), "no peer access", None, 1))
    cpus, gpus = device_groups(), device_groups(platform="cuda", groups=((0, 1),))
    assert communicators.reason(device_groups(groups=((0, 1),))) is None
    assert communicators.generation(cpus) == 0
    assert communicators.reason(gpus) == "no peer access"
    assert communicators.generation(gpus) == 1
    assert communicators.shared_groups(cpus) == "[]"


def test_a_failure_is_reported_if_other_devices_have_the_same_ids(monkeypatch):
    failed = Connection((0, 1), "cpu", (0, 1), None, End("rank 1 died"))
    know(monkeypatch, failed, Connection((0, 1), "cuda", (0, 0), None, End()))
    with pytest.raises(CommunicatorError, match=r"devices \[0, 1\]: rank 1 died"):
        communicators.check_communicators()


def test_connected_groups_run_calls_unless_they_have_a_reason(monkeypatch):
    unconnected = "its ranks span the hosts a and b"
    know(
        monkeypatch,
        Connection((0, 2), "cpu", (0, 1), None),
        Connection((1, 3), "cpu", (0, 1), unconnected),
    )

    def reason(*groups):
        process_of = {0: 0, 1: 0, 2: 1, 3: 1}
        return communicators.reason(device_groups(groups=groups, process_of=process_of))

    assert reason((0, 1), (2, 3)) is None
    assert reason((0, 2)) is None
    assert reason((0, 2), (1, 3)) == unconnected
    assert "[0, 1], which are not connected" in reason((2, 0))


@dataclasses.dataclass
class End:
    """A fake communicator."""

    failure: str | None = None


def test_another_axis_shares_connections_that_fit_and_have_not_failed(monkeypatch):
    end, enough = End(), device_groups().call_bytes
    know(
        monkeypatch,
        Connection((0, 1), "cpu", (0, 0), "no peer access"),
        Connection((2, 3), "cpu", (0, 1), None, end, 1, enough),
    )
    communicators.check_shared(device_groups())
    assert communicators.shared_groups(device_groups()) == "[(0, 1), (2, 3)]"
    with pytest.raises(ConfigurationError, match=rf"\[2, 3\].*{enough} bytes per rank"):
        communicators.check_shared(device_groups(capacity=1001))
    end.failure = "CommunicatorError: process 1 died"
    with pytest.raises(ConfigurationError, match="have failed: process 1 died"):
        communicators.check_shared(device_groups())
    communicators.check_shared(device_groups(groups=((1, 0), (3, 2)), capacity=1001))


@pytest.mark.parametrize(
    ("num_threads", "others", "share"),
    [
        (64, ["own"], 32),  # no quota: only the cores are divided
        (8, ["own"], 4),
        (8, ["another"], 8),
        (3, ["own"], 1),
        (2, ["own"] * 3, 1),
    ],
)
def test_a_cpu_quota_is_divided_by_the_processes_that_share_it(
    num_threads, others, share, monkeypatch
):
    received = []
    fake = types.SimpleNamespace(
        set_num_threads=lambda *given: received.append(given[:1]),
        default_num_threads=lambda: num_threads,
        has_engine=lambda: True,
    )
    monkeypatch.delenv("JAX_UB_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_engine, "load", lambda: fake)
    cores = list(range(64))
    monkeypatch.setattr(hosts, "cores", lambda: cores)
    info = {"host": hosts.identity(), "cores": cores}
    peer_info = {
        process: {**info, "control_groups": name}
        for process, name in enumerate(["own", *others])
    }
    connection_attempt._share_cores(device_groups(), peer_info)
    communicators.disconnect_all_but(())
    assert received == [(share,), (num_threads,)]


def test_an_axis_of_fewer_processes_leaves_the_others_their_cores(monkeypatch):
    received = []
    fake = types.SimpleNamespace(
        set_num_threads=lambda *given: received.append(given),
        default_num_threads=lambda: 4,
        has_engine=lambda: True,
    )
    monkeypatch.delenv("JAX_UB_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_engine, "load", lambda: fake)
    monkeypatch.setattr(hosts, "cores", lambda: [0, 1, 2, 3])
    own = {"host": hosts.identity(), "cores": [0, 1, 2, 3], "control_groups": ""}
    for num_processes in (2, 4, 2):
        peer_info = dict.fromkeys(range(num_processes), own)
        connection_attempt._share_cores(device_groups(process=1), peer_info)
    assert received == [(2, [2, 3]), (1, [1])]
    communicators.disconnect_all_but(())
    assert received[2:] == [(4,)]


def test_a_platform_without_an_engine_connects_nothing():
    transport_setup = transport_setup_of(device_groups(platform="rocm"))
    assert transport_setup.open_endpoint((0, 1)) is None
    assert transport_setup.why_not((0, 1), {}) == "no engine for rocm"
    with pytest.raises(NotImplementedError, match="no engine for rocm"):
        transport_setup.connect((0, 1), None, {}, 1)
