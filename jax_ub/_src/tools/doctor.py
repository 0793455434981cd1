"""Reports what is installed, and what can run or why not.

With `--processes`, several processes are started, which also compute together as the
processes of a job do.
"""

import argparse
import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import pickle
import platform
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ub as ub
from jax_ub._src.errors import UbError, UnsupportedOverlapError, nearest, see
from jax_ub._src.lowering_log import fallbacks
from jax_ub._src.methods import Method, MethodChoice, resolve
from jax_ub._src.output import format_bytes, format_table
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.collectives import bulk_all_gather
from jax_ub._src.runtime import (
    backend,
    communicators,
    cpu_engine,
    cuda_engine,
    hosts,
    registry,
    settings,
)
from jax_ub._src.tools import command_line
from jax_ub._src.tools.launch import parts

EXAMPLE = "doctor --processes 2"
_REQUIRED = ("jax", "jaxlib", "numpy")
_PACKAGES = ("jax_ub", *_REQUIRED, "flax", "optax", "orbax-checkpoint")
_NUM_DEVICES = 2  # the smallest number with which collectives communicate
_AXIS = "doctor"  # the mesh axis of the checks, which no program has configured


class State(enum.Enum):
    """Severity of a finding. Only a fault makes the exit status of `doctor` 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "FAULT"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check, which `doctor` prints as one line."""

    name: str
    state: State
    text: str

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "state": self.state.name.lower(), "text": self.text}


_COLORS = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_json(parser, "all findings")
    parts.add_arguments(parser)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints a line for each finding; returns 1 if there is a fault, else 0."""
    parts.check_options("doctor", given)
    if given.part is not None:
        jax.distributed.initialize()
        backend.start()  # fails with a one-line error if JAX cannot start
        found = list(examine(together=True))
        path = parts.part_path(given.part, jax.process_index())
        path.write_bytes(pickle.dumps(found))
        return 0
    findings = _in_processes(given) if given.processes > 1 else list(examine())
    rows = [(f.state.value, f.name, f.text) for f in findings]
    for finding, line in zip(findings, format_table((), rows, right=(0,)), strict=True):
        state = finding.state.value
        colored = command_line.colored(state, _COLORS.get(finding.state))
        command_line.say(given, line.replace(state, colored, 1))
    command_line.write(given, [finding.as_json() for finding in findings])
    return int(any(finding.state is State.FAULT for finding in findings))


def _in_processes(given) -> list[Finding]:
    """Runs the checks in several processes, and returns their findings.

    A finding of another process is left out if process 0 has the same one.
    """
    try:
        with parts.parts_of(
            "doctor",
            [],
            num_processes=given.processes,
            devices_per_process=given.devices_per_process or 1,
            stdout=command_line.progress_file(),
        ) as paths:
            first, *others = [pickle.loads(path.read_bytes()) for path in paths]
    except UbError as error:
        return [Finding("processes", State.FAULT, str(error))]
    return first + [
        dataclasses.replace(finding, name=f"process {index}: {finding.name}")
        for index, found in enumerate(others, start=1)
        for finding in found
        if finding not in first
    ]


def examine(*, together: bool = False) -> Iterator[Finding]:
    """Runs all checks. If JAX cannot start, runs those that need no device.

    If `together`, all processes of the job call this, and the checks compute across
    processes. No process may have called `initialize_ub` then.
    """
    _request_devices()
    yield from _packages()
    wrong = []
    for finding in _environment():
        if finding.state is State.FAULT:
            wrong.append(finding.text.removeprefix("doctor: "))
        yield finding
    for finding in _engines(together):
        # An invalid environment variable makes most checks of the engines fail with the
        # same text. It has been reported above, so these repetitions are skipped.
        if not any(text in finding.text for text in wrong):
            yield finding


def _engines(together: bool) -> Iterator[Finding]:
    yield from _cpu_engine()
    try:
        backend.start()
    except UnsupportedOverlapError as error:  # the remaining checks need devices
        yield Finding("devices", State.FAULT, str(error))
        return
    yield from device_findings()
    devices = jax.devices() if together else jax.local_devices()[:_NUM_DEVICES]
    mesh = Mesh(np.array(devices), (_AXIS,))
    if not together:
        yield from _methods_on(mesh)
    yield from _shared_memory()
    yield from _named_overlaps(mesh, together)
    yield from _fallbacks()


def _request_devices():
    if getattr(jax.config, "jax_num_cpu_devices", 0) > 0:
        return
    settings.set_pool_threads(_NUM_DEVICES)
    backend.request_cpu_devices(_NUM_DEVICES)


def _packages():
    yield Finding("python", State.OK, platform.python_version())
    for name in _PACKAGES:
        try:
            yield Finding(name, State.OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state = State.FAULT if name in _REQUIRED else State.NOTE
            yield Finding(name, state, "not installed")


def _environment():
    for name, value in settings.given().items():
        if name in settings.NAMES:
            yield Finding(name, State.NOTE, value)
        else:
            text = f"is not a variable of jax_ub. {nearest(name, settings.NAMES)}"
            yield Finding(name, State.WARNING, text)
    readers: tuple[Callable[[], object], ...] = (
        lambda: resolve("doctor", None, settings.method()),
        cpu_engine.check_isa,
        settings.timeout_s,
        settings.first_call_timeout_s,
        settings.num_threads,
        settings.pool_threads,
        settings.allow_tf32,
        settings.nvls,
    )
    for reader in readers:
        try:
            reader()
        except ValueError as error:
            yield Finding("environment", State.FAULT, str(error))
        except ImportError:  # of `check_isa`; `_cpu_engine` reports it
            continue


def _cpu_engine():
    reason = cpu_engine.why_not()
    if reason is not None:
        yield Finding("engine", State.WARNING, f"calls run plain jax.lax: {reason}")
        return
    running = ".".join(map(str, cpu_engine.running_ffi_api()))
    try:
        cpu = cpu_engine.load()
    except ImportError as error:
        text = f"{error} (jaxlib has {running})"
        yield Finding("XLA FFI API", State.FAULT, text)
        return
    built = ".".join(map(str, cpu.xla_ffi_api_version))
    text = f"engine built for {built}, jaxlib has {running}"
    yield Finding("XLA FFI API", State.OK, text)
    with contextlib.suppress(ValueError):  # `_environment` reports it
        cpu_engine.configure()
    others = [isa for isa in cpu.isas() if isa != cpu.isa()]
    also = f"; also possible here: {', '.join(others)}" if others else ""
    yield Finding("instruction set", State.OK, f"{cpu.isa()}{also}")
    cores, threads = len(hosts.cores()), cpu.num_threads()
    state, text = State.OK, f"{threads} compute, on {cores} cores"
    if threads > cores:
        state = State.WARNING
        text += f": they would share cores. Set JAX_UB_NUM_THREADS={cores}."
    yield Finding("engine threads", state, text)


def device_findings() -> Iterator[Finding]:
    devices = jax.devices()
    kind = cuda_engine.platform_of(devices[0])
    found = f"{len(devices)} {kind}"
    if kind not in ("cpu", "cuda"):
        text = f"{found}; there is no engine for them, and calls run plain jax.lax"
        yield Finding("devices", State.WARNING, text)
        return
    yield Finding("devices", State.OK, found)
    if kind == "cuda":
        yield from _gpus()
    else:
        reason = cuda_engine.why_not() or "built; there are no CUDA devices here"
        yield Finding("CUDA engine", State.NOTE, reason)
        yield from _pool_threads()


def _pool_threads():
    num = len(jax.local_devices())
    reason = hosts.why_few_pool_threads(num)
    text = f"{max(hosts.pool_threads(), num)} for {num} devices"
    state = State.OK if reason is None else State.WARNING
    yield Finding("jaxlib threads", state, reason or text)


def _gpus():
    reason = cuda_engine.why_not()
    if reason is not None:
        yield Finding("CUDA engine", State.FAULT, f"calls run plain jax.lax: {reason}")
        return
    native = cuda_engine.load()
    major, minor = divmod(native.driver_version(), 1000)
    yield Finding("CUDA driver", State.OK, f"for CUDA {major}.{minor // 10}")
    devices = cuda_engine.usable_devices()
    yield _cublaslt(native, devices)
    if settings.shares_hardware_queue():
        text = (
            "1: all streams share a hardware queue, in which communication waits for "
            "GEMMs. Unset it; jax_ub does not need it."
        )
        yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", State.WARNING, text)
    for device in devices:
        major, minor = device["compute_capability"]
        text = (
            f"{device['name']}, sm_{major}{minor}, {device['num_sms']} "
            f"multiprocessors, {device['num_copy_engines']} copy engines, "
            f"{format_bytes(device['memory_bytes'])}, "
            f"{'multicast' if device['has_multicast'] else 'no multicast'}"
        )
        yield Finding(f"GPU {device['ordinal']}", State.OK, text)
    yield _peer_access([device["ordinal"] for device in devices])
    text = (
        "in heaps of jax_ub, by the first of vmm, fabric and ipc that all can use; not "
        f"by XLA's communicators and windows. {see('docs/gpu.md')}"
    )
    yield Finding("shared memory", State.NOTE, text)


def _cublaslt(native, devices):
    library = native.cublaslt()
    text = f"version {library['version']}, {library['path']}"
    faulty = [
        str(device["ordinal"])
        for device in devices
        if native.may_corrupt_concurrent_gemms(device["compute_capability"][0])
    ]
    if faulty:
        text += (
            f": its GEMMs may corrupt concurrent work on GPU {', '.join(faulty)}, so "
            "the engine runs them on one stream, and XLA may not. Install "
            "nvidia-cublas 13.2 or newer."
        )
    return Finding("cuBLASLt", State.WARNING if faulty else State.OK, text)


def _peer_access(ordinals):
    if len(ordinals) == 1:
        return Finding("peer access", State.NOTE, "one GPU in this process")
    rows = cuda_engine.load().peers(ordinals)
    blocked = [
        f"{source} to {target}"
        for source, row in zip(ordinals, rows, strict=True)
        for target, can in zip(ordinals, row, strict=True)
        if not can
    ]
    if blocked:
        text = f"none from GPU {', '.join(blocked)}"
        return Finding("peer access", State.WARNING, text)
    text = f"all {len(ordinals)} GPUs of this process can access each other"
    return Finding("peer access", State.OK, text)


def _methods_on(mesh: Mesh) -> Iterator[Finding]:
    """Runs an all-gather + GEMM by each method, and checks the result with NumPy."""
    # The operands are small integers, whose sums are exact. All chunks differ, so that
    # a wrong order of chunks is detected.
    x = (np.arange(8 * mesh.size * 16) % 23).reshape(-1, 16).astype(np.float32)
    w = x.T + 1
    for method in Method:
        name = f'method "{method.value}"'
        try:
            y = _column_linear(mesh, method)(x, w)
            shards = [(np.asarray(s.data), s.index) for s in y.addressable_shards]
        except Exception as error:  # any error is a finding
            state = state_of_failure(method, mesh.local_devices)
            yield Finding(name, state, f"{type(error).__name__}: {error}")
            continue
        if all(np.array_equal(shard, (x @ w)[index]) for shard, index in shards):
            yield Finding(name, State.OK, f"runs on {mesh.size} devices")
        else:
            yield Finding(name, State.FAULT, "runs, but its result is wrong")


def _column_linear(mesh, method):
    function = functools.partial(ub.all_gather_matmul, axis_name=_AXIS, method=method)
    if method is Method.BULK:
        function = functools.partial(_bulk_linear, mesh.size)
    rows, columns = PartitionSpec(_AXIS), PartitionSpec(None, _AXIS)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(rows, columns), out_specs=columns
    )
    return jax.jit(mapped)


def _bulk_linear(num_ranks, x, w):
    """Computes `all_gather(x) @ w`, with x gathered during an independent GEMM."""
    dy = jnp.ones((num_ranks * x.shape[0], w.shape[1]), x.dtype)
    execution = Execution(
        label="doctor",
        choice=MethodChoice(Method.BULK),
        axis_name=(_AXIS,),
        num_ranks=num_ranks,
    )
    _, gathered = bulk_all_gather(execution, (dy,), (w,), x)
    return gathered @ w


def state_of_failure(method: Method, devices) -> State:
    """Returns the severity of a method's failure on these devices.

    It is a fault if an engine of this installation runs the method there, else a note.
    """
    kind = cuda_engine.platform_of(devices[0])
    on_gpus = method is not Method.DIRECT and cuda_engine.why_not() is None
    on_cpus = kind == "cpu" and cpu_engine.why_not() is None
    expected = on_gpus if kind == "cuda" else on_cpus
    return State.FAULT if expected else State.NOTE


def _shared_memory():
    host = hosts.short_name(hosts.identity())
    try:
        cpu_engine.load().endpoint()
    except ImportError:
        return
    except RuntimeError as error:
        yield Finding("between processes", State.FAULT, str(error))
    else:
        text = f"can share memory with others on host {host!r}"
        yield Finding("between processes", State.OK, text)


def _named_overlaps(mesh: Mesh, together: bool) -> Iterator[Finding]:
    """Reports how ranks are connected, and the method of each pass of a layer.

    If this process has not called `initialize_ub`, calls it on `mesh` and reports its
    defaults; if `together`, then also checks the methods across processes.
    """
    if registry.axes():
        yield from _connections()
        for axis in registry.axes():
            text = f"{axis.tp_size} ranks, [T, H] = {list(axis.shape)}"
            yield Finding(f"axis {', '.join(axis.axis_name)}", State.OK, text)
            yield from _overlaps_by_method(axis)
        return
    try:
        ub.initialize_ub((8 * mesh.size, 16), mesh.size, mesh=mesh, axis_name=_AXIS)
    except Exception as error:  # any error is a finding
        yield Finding("initialize_ub", State.FAULT, f"{type(error).__name__}: {error}")
        return
    yield from _connections()
    if together:
        yield from _methods_on(mesh)
    (axis,) = registry.axes()
    ub.destroy_ub()
    text = "not called here; the next lines are its defaults"
    yield Finding("initialize_ub", State.NOTE, text)
    yield from _overlaps_by_method(axis)


def _overlaps_by_method(axis) -> Iterator[Finding]:
    """Lists the passes of layers, such as "qkv_fprop", that use each method.

    Yields a finding for each method and quantization mode, with the names of the passes
    for which `initialize_ub` has configured them on a mesh axis.
    """
    by_method: dict[str, list[str]] = {}
    for (name, mode), overlap in axis.overlaps.items():
        by_method.setdefault(f"{overlap.method} ({mode.name})", []).append(name)
    for key, names in by_method.items():
        yield Finding(key, State.NOTE, ", ".join(names))


def _connections():
    for connection in communicators.connections():
        name = f"devices {list(connection.group)}"
        state, text = State.OK, describe_connection(connection)
        if (failure := connection.failure) is not None:
            state, text = State.FAULT, failure
        elif connection.reason is not None:
            text = f'"auto" is plain jax.lax, since {connection.reason}'
            state = State.WARNING
        processes = sorted(set(connection.processes))
        yield Finding(name, state, f"processes {processes}: {text}")


def describe_connection(connection: communicators.Connection) -> str:
    """Describes how ranks share memory, and why preferred modes are unusable."""
    communicator = connection.communicator
    sharing_mode = getattr(communicator, "sharing_mode", None)
    if communicator is None or sharing_mode is None:
        return "connected"
    nvls = " with nvls" if communicator.has_multicast else ""
    unusable = [f"; not by {mode}: {why}" for mode, why in communicator.fallbacks]
    return f"connected by {sharing_mode}{nvls}{''.join(unusable)}"


def _fallbacks():
    by_reason: dict[str, list[str]] = {}
    for fallback in fallbacks():
        by_reason.setdefault(fallback.reason, []).append(fallback.label)
    for reason, labels in by_reason.items():
        text = f"{len(labels)} calls, the last {labels[-1]}: {reason}"
        yield Finding("fallback", State.WARNING, text)
