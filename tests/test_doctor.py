import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from cuda_programs import StandIn
from programs import tp_mesh

import jax_ub as ub
from jax_ub.__main__ import main
from jax_ub._src.lowering_log import Fallback
from jax_ub._src.methods import Method
from jax_ub._src.runtime import communicators, cpu_engine, cuda_engine
from jax_ub._src.runtime.communicators import Connection
from jax_ub._src.tools import doctor
from jax_ub._src.tools.doctor import Finding, State
from jax_ub._src.tools.launch.job import Job
from jax_ub._src.tools.launch.parts import part_path


def findings():
    return {finding.name: finding for finding in doctor.examine()}


def test_healthy_installation_has_no_fault(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert "FAULT" not in report
    assert 'method "direct"' in report


def test_every_method_runs():
    found = findings()
    for method in Method:
        assert found[f'method "{method.value}"'].text == "runs on 2 devices"


@pytest.mark.slow
def test_missing_extension_is_a_fault_with_the_build_command():
    program = (
        "import sys; sys.modules['jax_ub._cpu'] = None\n"
        "from jax_ub.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search("FAULT .*jax_ub._cpu is missing.*pip install", done.stdout)


def test_report_is_json_on_request(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name", "state", "text"} == set(found[0])
    assert {"python", "jax", "XLA FFI API", "devices"} <= {f["name"] for f in found}
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [f["state"] for f in found] == [line.split()[0].lower() for line in lines]


def test_missing_engine_is_a_fault(monkeypatch, capsys):
    def missing():
        raise ImportError("jax_ub: its compiled engine jax_ub._cpu is missing.")

    monkeypatch.setattr(cpu_engine, "load", missing)
    assert main(["doctor"]) == 1
    assert "jax_ub._cpu is missing" in capsys.readouterr().out


def test_too_few_jaxlib_threads_are_a_warning(monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    finding = findings()["jaxlib threads"]
    assert finding.state is State.WARNING
    assert "Set NPROC=64 before jax starts" in finding.text


@pytest.mark.parametrize("name", ["JAX_UB_TIMEOUT_S", "JAX_UB_NUM_THREADS", "NPROC"])
def test_setting_that_is_no_number_is_a_fault(name, monkeypatch):
    monkeypatch.setenv(name, "many")
    finding = findings()["environment"]
    assert finding.state is State.FAULT
    assert f"{name} = 'many' is not a positive number" in finding.text
    # Other checks fail for the same reason, which is reported once.
    assert sum("'many'" in finding.text for finding in doctor.examine()) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("JAX_UB_METHOD", "= 'pipelines' is not a method. Did you mean 'pipeline'"),
        ("JAX_UB_ISA", "= 'pipelines' is not available on this machine. Known: 'p"),
    ],
)
def test_unknown_value_of_a_setting_is_a_fault(name, text, monkeypatch):
    monkeypatch.setenv(name, "pipelines")
    finding = findings()["environment"]
    assert finding.state is State.FAULT
    assert f"{name} {text}" in finding.text
    assert sum("'pipelines'" in finding.text for finding in doctor.examine()) == 1


def test_misspelt_variable_is_a_warning_that_names_the_nearest(monkeypatch):
    monkeypatch.setenv("JAX_UB_TIMEOUT", "5")
    finding = findings()["JAX_UB_TIMEOUT"]
    assert finding.state is State.WARNING
    assert "Did you mean 'JAX_UB_TIMEOUT_S'?" in finding.text


def test_more_engine_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("NPROC", "64")
    finding = findings()["engine threads"]
    if cpu_engine.load().num_threads() == 1:
        pytest.skip("the engine computes with one thread on this machine")
    assert finding.state is State.WARNING
    assert "Set JAX_UB_NUM_THREADS=1" in finding.text


@pytest.mark.parametrize(
    "result",
    [
        lambda x, w: x @ w + 1,
        lambda x, w: np.roll(x, 8, axis=0) @ w,  # the chunks of both ranks are swapped
        lambda x, w: x @ np.roll(w, 8, axis=1),
    ],
)
def test_wrong_results_are_a_fault(monkeypatch, result):
    def wrong(mesh, method):
        return lambda x, w: jax.numpy.asarray(result(x, w))

    monkeypatch.setattr(doctor, "_column_linear", wrong)
    finding = findings()['method "direct"']
    assert finding.state is State.FAULT
    assert finding.text == "runs, but its result is wrong"


def test_named_overlaps_and_their_methods_are_listed():
    found = findings()
    assert "not called here" in found["initialize_ub"].text
    assert len(found["initialize_ub"].text) < 80
    assert found["pipeline (NONE)"].text == "proj_fprop, fc2_fprop"
    assert not ub.is_ub_initialized()
    ub.initialize_ub((8, 16), 2, use_fp8=True, mesh=tp_mesh(2))
    found = findings()
    assert found["axis tp"].text == "2 ranks, [T, H] = [8, 16]"
    assert found["ring_exchange (FP8)"].text.startswith("qkv_fprop, ")
    assert ub.is_ub_initialized("tp")


@pytest.mark.slow
def test_several_processes_compute_together(capfd):
    arguments = ["--processes", "2", "--devices-per-process", "2", "--json"]
    assert main(["doctor", *arguments]) == 0
    found = {one["name"]: one for one in json.loads(capfd.readouterr().out)}
    (group,) = [name for name in found if name.startswith("devices [0, 1, ")]
    assert found[group]["text"] == "processes [0, 1]: connected"
    for method in Method:
        assert found[f'method "{method.value}"']["text"] == "runs on 4 devices"
    # Equal findings of process 1 are omitted.
    assert not any(name.startswith("process 1: ") for name in found)


@pytest.mark.slow
def test_failed_processes_are_a_fault(monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    assert main(["doctor", "--processes", "2"]) == 1
    out, err = capfd.readouterr()
    assert "FAULT  processes  doctor: 2 processes failed with exit status 2" in out
    assert "] python -m jax_ub: error: jax does not start on 'no_such_platform'" in err
    assert "Traceback" not in err


def test_an_environment_that_starts_no_processes_is_a_fault(monkeypatch, capsys):
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=2")
    assert main(["doctor", "--processes", "2"]) == 1
    assert f"FAULT  processes  launch: XLA_FLAGS has {flag}" in capsys.readouterr().out


def test_finding_of_one_process_names_the_process(monkeypatch, capsys):
    def of_each(self, arguments, stdout):
        path = pathlib.Path(arguments[arguments.index("--part") + 1])
        for index, threads in enumerate(("8", "2")):
            finding = Finding("jaxlib threads", State.WARNING, threads)
            part_path(path, index).write_bytes(pickle.dumps([finding]))
        return 0

    monkeypatch.setattr(Job, "run", of_each)
    assert main(["doctor", "--processes", "2"]) == 0
    first, other = capsys.readouterr().out.splitlines()
    assert first.split() == ["warning", "jaxlib", "threads", "8"]
    assert other.split() == ["warning", "process", "1:", "jaxlib", "threads", "2"]


def test_zero_processes_are_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--processes", "0"])
    assert "--processes: '0' is not" in capsys.readouterr().err


def test_devices_per_process_require_several_processes(capsys):
    assert main(["doctor", "--devices-per-process", "4"]) == 2
    assert (
        "--devices-per-process 4 requires several processes" in capsys.readouterr().err
    )


def test_process_that_cannot_share_memory_is_a_fault(monkeypatch):
    def refused():
        raise RuntimeError("CommunicatorError: no sockets here")

    monkeypatch.setattr(cpu_engine.load(), "endpoint", refused)
    finding = findings()["between processes"]
    assert finding.state is State.FAULT
    assert "no sockets here" in finding.text


def test_connections_and_failures_are_listed(monkeypatch):
    class Failed:
        failure = "rank 1 died"

        def close(self):
            pass

    known = {
        ("cpu", group): Connection(group, "cpu", (0, 1), reason, communicator)
        for group, reason, communicator in (
            ((0, 9), None, None),
            ((1, 8), "its ranks span the hosts a and b", None),
            ((2, 7), None, Failed()),
        )
    }
    monkeypatch.setattr(communicators, "_CONNECTIONS", known)
    found = findings()
    assert found["devices [0, 9]"].text == "processes [0, 1]: connected"
    assert found["devices [1, 8]"].state is State.WARNING
    assert "span the hosts a and b" in found["devices [1, 8]"].text
    assert found["devices [2, 7]"].state is State.FAULT
    assert "rank 1 died" in found["devices [2, 7]"].text


def test_fallbacks_are_counted_by_reason(monkeypatch):
    monkeypatch.setattr(
        doctor, "fallbacks", lambda: (Fallback("a", "why"), Fallback("b", "why"))
    )
    assert findings()["fallback"].text == "2 calls, the last b: why"


class Gpus(StandIn):
    """A fake CUDA engine with two GPUs, of which the second cannot reach the first."""

    def driver_version(self):
        return 13010

    def cublaslt(self):
        return {"path": "/nvidia/libcublasLt.so.13", "version": 130200}

    def may_corrupt_concurrent_gemms(self, major):
        return major == 10

    def devices(self):
        gpu = {
            "name": "NVIDIA H200",
            "compute_capability": (9, 0),
            "num_sms": 132,
            "num_copy_engines": 3,
            "memory_bytes": 141 << 30,
        }
        return [
            {"ordinal": ordinal, "has_multicast": ordinal == 0, **gpu}
            for ordinal in (0, 1)
        ]

    def peers(self, ordinals):
        assert ordinals == [0, 1]
        return [[True, True], [False, True]]


@pytest.fixture
def gpus(monkeypatch):
    native = Gpus()
    monkeypatch.setattr(cuda_engine, "load", lambda: native)
    monkeypatch.setattr(cuda_engine, "local_devices", lambda: jax.local_devices()[:2])
    monkeypatch.setattr(cuda_engine, "platform_of", lambda device: "cuda")
    return native


def test_gpus_and_their_drivers_are_listed(gpus):
    found = {finding.name: finding for finding in doctor.device_findings()}
    assert found["CUDA driver"].text == "for CUDA 13.1"
    assert found["cuBLASLt"].text == "version 130200, /nvidia/libcublasLt.so.13"
    assert found["GPU 1"].text == (
        "NVIDIA H200, sm_90, 132 multiprocessors, 3 copy engines, 141.0 GiB, "
        "no multicast"
    )
    assert found["GPU 0"].text.endswith(", multicast")
    assert found["peer access"].state is State.WARNING
    assert found["peer access"].text == "none from GPU 1 to 0"
    assert found["shared memory"].text == (
        "in heaps of jax_ub, by the first of vmm, fabric and ipc that all can use; "
        "not by XLA's communicators and windows. See docs/gpu.md in the repository of "
        "jax_ub"
    )


def test_faulty_cublas_is_a_warning(gpus, monkeypatch):
    blackwell = [one | {"compute_capability": (10, 0)} for one in gpus.devices()[1:]]
    devices = [*gpus.devices()[:1], *blackwell]
    monkeypatch.setattr(gpus, "devices", lambda: devices)
    found = {finding.name: finding for finding in doctor.device_findings()}
    assert found["cuBLASLt"].state is State.WARNING
    assert "may corrupt concurrent work on GPU 1, so" in found["cuBLASLt"].text
    assert "Install nvidia-cublas 13.2 or newer" in found["cuBLASLt"].text


def test_streams_that_share_a_hardware_queue_are_a_warning(gpus, monkeypatch):
    for value, expected in (("1", True), ("8", False)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
        found = {finding.name: finding for finding in doctor.device_findings()}
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in found) is expected
        if expected:
            warning = found["CUDA_DEVICE_MAX_CONNECTIONS"]
            assert warning.state is State.WARNING
            assert "all streams share a hardware queue" in warning.text


def test_unusable_cuda_engine_is_a_fault(gpus):
    gpus.why_not = lambda: "the driver is for CUDA 11.4"
    found = {finding.name: finding for finding in doctor.device_findings()}
    assert found["CUDA engine"].state is State.FAULT
    assert found["CUDA engine"].text == (
        "calls run plain jax.lax: the driver is for CUDA 11.4"
    )


def test_the_guide_names_every_state():
    guide = pathlib.Path(__file__).parents[1] / "docs/commands.md"
    text = guide.read_text()
    assert [state.value for state in State if f"`{state.value}`" not in text] == []


def test_failure_of_a_method_without_gpu_support_is_a_note(gpus):
    found = jax.local_devices()
    assert doctor.state_of_failure(Method.DIRECT, found) is State.NOTE
    assert doctor.state_of_failure(Method.PIPELINE, found) is State.FAULT


def test_sharing_mode_of_gpus_is_listed_with_rejected_modes():
    class Heaps:
        sharing_mode = "ipc"
        fallbacks = (("vmm", "process 1: cuMemCreate: not permitted"),)
        has_multicast = False

    connection = Connection((0, 1), "cuda", (0, 1), None, Heaps())
    assert doctor.describe_connection(connection) == (
        "connected by ipc; not by vmm: process 1: cuMemCreate: not permitted"
    )


def test_multicast_is_listed():
    class Heaps:
        sharing_mode = "vmm"
        fallbacks = ()
        has_multicast = True

    connection = Connection((0, 1), "cuda", (0, 1), None, Heaps())
    assert doctor.describe_connection(connection) == "connected by vmm with nvls"
