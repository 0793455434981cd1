"""Tests the environment variables of launched processes."""

import os

import pytest

from jax_ub._src.tools.launch.job import Job
from jax_ub.errors import ConfigurationError


def of_process(process, given=(), **changes):
    job = Job(**{"num_processes": 4, "devices_per_process": 2, **changes})
    return job.environment(dict(given), process, port=4321)


def test_variables_name_process_devices_and_coordinator():
    found = of_process(3)
    assert found["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:4321"
    assert found["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:4321"
    assert found["SLURM_PROCID"] == found["SLURM_LOCALID"] == "3"
    assert found["SLURM_NTASKS"] == "4"
    assert found["JAX_NUM_CPU_DEVICES"] == "2"
    assert found["JAX_LOCAL_DEVICE_IDS"] == "6,7"


def test_jaxlib_has_enough_threads_for_the_devices(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert int(of_process(0, devices_per_process=100)["NPROC"]) == 400


def test_user_settings_are_kept():
    given = {"NPROC": "5", "PYTHONUNBUFFERED": "", "HOME": "/root", "SLURM_JOB_ID": "7"}
    assert given.items() <= of_process(0, given).items()


def test_variables_of_an_outer_cluster_are_replaced():
    given = {"SLURM_PROCID": "9", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}
    found = of_process(1, given)
    assert found["SLURM_PROCID"] == "1"
    assert "OMPI_MCA_orte_hnp_uri" not in found


def test_coordinator_is_excluded_from_proxies():
    given = {"https_proxy": "http://proxy:3128", "no_proxy": "example.org"}
    assert of_process(0, given)["no_proxy"] == "example.org,127.0.0.1"
    assert "no_proxy" not in of_process(0)


def test_processes_simulate_hosts():
    hosts = [of_process(p, num_hosts=2)["JAX_UB_HOST_ID"] for p in range(4)]
    assert hosts == ["host0", "host0", "host1", "host1"]
    assert "JAX_UB_HOST_ID" not in of_process(0)


def test_device_count_in_xla_flags_is_an_error():
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with pytest.raises(ConfigurationError, match="out of XLA_FLAGS and pass --devices"):
        of_process(0, given)
