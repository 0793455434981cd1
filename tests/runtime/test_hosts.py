import json

import jax
import jax.numpy as jnp
import pytest
from jax import P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.runtime import hosts


def test_a_host_is_identified_by_kernel_and_network_or_by_its_variable(monkeypatch):
    monkeypatch.delenv("JAX_UB_HOST_ID", raising=False)
    own = hosts.identity()
    assert len(own.split()) == 3
    assert hosts.identity() == own
    monkeypatch.setenv("JAX_UB_HOST_ID", "a-b")
    assert hosts.identity() == hosts.short_name("a-b") == "a-b"


def test_without_proc_a_host_is_its_name(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_UB_HOST_ID", raising=False)
    monkeypatch.setattr(hosts, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr("platform.node", lambda: "host")
    assert hosts.identity() == "host"


@pytest.mark.parametrize(
    ("own", "others", "share"),
    [
        ([0, 1, 2, 3], [], 4),
        ([0, 1, 2, 3], [[0, 1, 2, 3]], 2),
        ([0, 1], [[2, 3]], 2),  # bound to different cores
        ([0, 1, 2, 3], [[2, 3]], 3),
        ([0, 1], [[0, 1]] * 7, 1),
        ([0, 1, 2], [[0, 1, 2]] * 2, 1),
    ],
)
def test_cores_are_divided_by_those_that_may_use_them(own, others, share):
    assert hosts.thread_share(own, [own, *others]) == share


def test_without_proc_the_control_groups_are_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "_CONTROL_GROUPS", tmp_path / "none")
    assert hosts.control_groups() == ""


def test_names_of_control_groups_may_be_any_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "_CONTROL_GROUPS", tmp_path / "cgroup")
    found = set()
    for name in (b"/caf\xe9", b"/caf\xe8"):
        (tmp_path / "cgroup").write_bytes(b"0::" + name)
        found.add(json.dumps(hosts.control_groups()))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("own", "num_processes", "parts"),
    [
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], 2, [[0], [1]]),
        ([4, 5, 6, 7], 3, [[4], [5], [6, 7]]),
        ([0, 1], 4, [[0], [1], [0], [1]]),
    ],
)
def test_processes_with_the_same_cores_divide_them(own, num_processes, parts):
    everyone = [own] * num_processes
    assert [
        hosts.process_cpu_set(own, everyone, i) for i in range(num_processes)
    ] == parts


def test_processes_with_different_cores_keep_them():
    assert hosts.process_cpu_set([2, 3], [[0, 1], [2, 3]], 1) == [2, 3]


@pytest.mark.parametrize(
    ("given", "num_cores", "num_devices", "threads"),
    [
        ("8", 64, 4, None),  # 2 threads for each device do not hang
        ("7", 64, 4, 7),
        ("2", 64, 4, 4),  # jaxlib starts one thread for each device
        ("", 8, 4, None),
        ("many", 2, 4, 4),  # jaxlib ignores it
        ("", 1, 1, None),
        ("32", 2, 16, None),  # the settings of these tests
    ],
)
def test_fewer_than_two_threads_for_each_device_may_hang(
    given, num_cores, num_devices, threads, monkeypatch
):
    monkeypatch.setenv("NPROC", given)
    monkeypatch.setattr(hosts, "cores", lambda: list(range(num_cores)))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    reason = hosts.why_few_pool_threads(num_devices)
    if threads is None:
        assert reason is None
    else:
        assert reason.startswith(f"jaxlib has {threads} threads for {num_devices} CPU")
        assert reason.endswith(f"Set NPROC={4 * num_devices} before jax starts.")


def _lower(num_ranks):
    def scale(x):
        return ub.all_reduce(3 * x, axis_name="tp")

    program = on_ranks(scale, tp_mesh(num_ranks), P("tp"), P())
    jax.jit(program).lower(jnp.ones((num_ranks, 4)))


def test_lowering_warns_of_too_few_threads_once(monkeypatch):
    monkeypatch.setenv("NPROC", "7")
    text = r"has 7 threads for 4 CPU devices.*NPROC=.* See docs/troubleshooting\.md#"
    with pytest.warns(UserWarning, match=text):
        _lower(4)
    _lower(4)


def test_lowering_does_not_warn_where_the_threads_suffice(monkeypatch):
    monkeypatch.setenv("NPROC", "6")
    _lower(3)
    _lower(1)
