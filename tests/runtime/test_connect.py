"""The engine's end of a communicator, in groups of one process.

No launcher is needed for those; `tests/processes` has the others.
"""

import os
import pathlib

import pytest

from jax_ub._src.runtime import cpu_engine


@pytest.fixture
def cpu():
    return cpu_engine.load()


def connect(cpu, endpoint=None, **changes):
    of_one_process = {
        "name": "test",
        "devices": [900, 901],
        "processes": [3, 3],
        "process": 3,
        "addresses": {},
        "tokens": {},
        "buffer_bytes": 1 << 16,
        "timeout_s": 20.0,
    }
    return cpu.connect(endpoint or cpu.endpoint(), **{**of_one_process, **changes})


def test_every_endpoint_has_a_private_address(cpu):
    one, other = cpu.endpoint(), cpu.endpoint()
    assert one.address != other.address
    assert one.token != other.token


def test_a_communicator_describes_itself(cpu):
    ends = connect(cpu)
    assert ends.name == "test"
    assert ends.size_bytes >= 4 << 16  # two buffers per rank
    assert ends.calls == 0
    assert ends.failure is None
    ends.close()
    assert "closed its communicator" in ends.failure
    ends.close()


def test_closing_frees_descriptors_and_memory(cpu):
    def held():
        maps = pathlib.Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd")

    connect(cpu).close()
    before = held()
    for _ in range(20):
        connect(cpu).close()
    assert held() == before


def test_devices_cannot_be_connected_twice(cpu):
    ends = connect(cpu)
    with pytest.raises(RuntimeError, match="connected already, by 'test': close that"):
        connect(cpu, name="again")
    ends.close()
    connect(cpu, name="again").close()


def test_an_endpoint_can_be_used_once(cpu):
    endpoint = cpu.endpoint()
    connect(cpu, endpoint).close()
    with pytest.raises(ValueError, match="the endpoint was used already"):
        connect(cpu, endpoint)


def test_every_rank_has_a_device_and_a_process(cpu):
    with pytest.raises(ValueError, match="2 devices and 1 processes: expected one of"):
        connect(cpu, processes=[3])


def test_every_address_has_a_token(cpu):
    with pytest.raises(ValueError, match="no token of process 4"):
        connect(cpu, addresses={4: "nowhere"})


def test_a_missing_process_is_named_at_the_deadline(cpu):
    other = cpu.endpoint()  # no process accepts there
    with pytest.raises(RuntimeError, match="process 4"):
        connect(
            cpu,
            processes=[3, 4],
            addresses={4: other.address},
            tokens={4: other.token},
            timeout_s=0.3,
        )
