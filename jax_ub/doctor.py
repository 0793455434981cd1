"""Says what is installed, what can run here and why not: `python -m jax_ub doctor`.

With `--processes` it looks from each of several processes, which compute together as
those of a job would.
"""

import argparse
import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_ub.bench.arguments import positive
from jax_ub.errors import UnsupportedOverlapError, nearest
from jax_ub.initialize import destroy_ub, initialize_ub
from jax_ub.launch.parts import run_parts
from jax_ub.methods import Method, fallbacks, resolve
from jax_ub.rules.all_gather_matmul import all_gather_matmul
from jax_ub.runtime import (
    backend,
    communicators,
    cuda,
    engine,
    hosts,
    overlaps,
    settings,
)

_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
_REQUIRED = _PACKAGES[1:4]
# As many devices as a trial needs to communicate at all.
_TRIAL_DEVICES = 2
# An axis that no program has initialised.
_TRIAL_AXIS = "doctor"
# jaxlib needs at least two, and waits for some of them itself.
_POOL_THREADS_EACH = 4


class State(enum.Enum):
    """How a finding is marked; only a fault makes the doctor fail."""

    FINE = "ok"
    NOTE = "--"
    WARNING = "warn"
    FAULT = "FAULT"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    text: str

    def as_json(self) -> dict[str, str]:
        """The same in JSON's types."""
        return {"name": self.name, "state": self.state.name.lower(), "text": self.text}

    @classmethod
    def from_json(cls, found: dict[str, str]) -> "Finding":
        """What `as_json` was made of."""
        return cls(found["name"], State[found["state"].upper()], found["text"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead")
    add("--processes", type=positive, default=1, help="look from this many processes")
    add(
        "--devices-per-process",
        type=positive,
        default=1,
        metavar="K",
        help="with --processes: CPU devices of each, or GPUs (default: 1)",
    )
    # Of one of several processes: where it writes, before its number is put in.
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints the report.

    Returns:
        1 if there is a fault, else 0.
    """
    if given.part is not None:
        jax.distributed.initialize()
        _write(_part(given.part, jax.process_index()), list(examine(together=True)))
        return 0
    several = given.processes > 1
    findings = _in_processes(given) if several else list(examine())
    if given.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state.value:>5}  {finding.name:<{width}}  {finding.text}")
    return int(any(finding.state is State.FAULT for finding in findings))


def _in_processes(given) -> list[Finding]:
    """What process 0 finds, then what others find and it does not."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "findings.json")
        status = run_parts(
            ["doctor", "--part", str(path)],
            num_processes=given.processes,
            devices_per_process=given.devices_per_process,
            prints_aside=True,
        )
        if status:
            text = f"ended with exit status {status}; what they wrote says why"
            return [Finding(f"{given.processes} processes", State.FAULT, text)]
        first, *others = (_read(_part(path, i)) for i in range(given.processes))
    return first + [
        dataclasses.replace(finding, name=f"process {index}: {finding.name}")
        for index, found in enumerate(others, start=1)
        for finding in found
        if finding not in first
    ]


def _part(path, process):
    return path.with_suffix(f".{process}.json")


def _write(path, findings):
    path.write_text(json.dumps([finding.as_json() for finding in findings]))


def _read(path):
    return [Finding.from_json(found) for found in json.loads(path.read_text())]


def examine(*, together: bool = False) -> Iterator[Finding]:
    """Looks at everything, in the order in which one thing needs another.

    Args:
        together: whether all processes of the job do so now, and try to compute with
            one another. None of them has called `initialize_ub`.
    """
    _start_trial_devices()
    yield from _packages()
    yield from _environment()
    yield from _ffi_api()
    try:
        backend.start()
    except UnsupportedOverlapError as error:  # what follows needs devices
        yield Finding("devices", State.FAULT, str(error))
        return
    yield from _engine()
    yield from _devices()
    if not together:
        yield from _trials(_trial_mesh(together))
    yield from _between_processes()
    yield from _named_overlaps(together)
    yield from _fallbacks()


def _start_trial_devices():
    if getattr(jax.config, "jax_num_cpu_devices", 0) > 0:
        return
    settings.set_pool_threads(_POOL_THREADS_EACH * _TRIAL_DEVICES)
    # Where jax has started already, its devices are what there is.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", _TRIAL_DEVICES)


def _packages():
    yield Finding("python", State.FINE, platform.python_version())
    for name in _PACKAGES:
        try:
            yield Finding(name, State.FINE, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state = State.FAULT if name in _REQUIRED else State.NOTE
            yield Finding(name, state, "not installed")


def _environment():
    for name, value in settings.given().items():
        if name in settings.NAMES:
            yield Finding(name, State.NOTE, value)
        else:
            known = nearest(name, settings.NAMES)
            yield Finding(name, State.WARNING, f"is no variable of jax_ub's. {known}")
    readers: tuple[Callable[[], object], ...] = (
        _method,
        _isa,
        settings.timeout_s,
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


def _method():
    resolve("doctor", None, settings.method())


def _isa():
    with contextlib.suppress(ImportError):  # another finding's
        engine.check_isa()


def _ffi_api():
    running = ".".join(map(str, engine.running_ffi_api()))
    try:
        built = ".".join(map(str, engine.load().xla_ffi_api_version))
    except ImportError as error:
        yield Finding("XLA FFI API", State.FAULT, f"{error} (jaxlib has {running})")
    else:
        text = f"engine built for {built}, jaxlib has {running}"
        yield Finding("XLA FFI API", State.FINE, text)


def _engine():
    try:
        cpu = engine.load()
    except ImportError:
        return
    others = [isa for isa in cpu.isas() if isa != cpu.isa()]
    also = f"; also possible here: {', '.join(others)}" if others else ""
    yield Finding("instruction set", State.FINE, f"{cpu.isa()}{also}")
    cores, threads = len(os.sched_getaffinity(0)), cpu.num_threads()
    text = f"{threads} compute, on {cores} cores"
    if threads > cores:
        more = f"{text}: they would take turns. Set JAX_UB_NUM_THREADS={cores}."
        yield Finding("engine threads", State.WARNING, more)
    else:
        yield Finding("engine threads", State.FINE, text)


def _devices():
    devices = jax.devices()
    platform = cuda.platform_of(devices[0])
    found = f"{len(devices)} {platform}"
    if platform == "cuda":
        yield Finding("devices", State.FINE, found)
        yield from _gpus()
        return
    if platform != "cpu":
        text = f"{found}; there is no engine for them, and calls run plain jax.lax"
        yield Finding("devices", State.WARNING, text)
        return
    yield Finding("devices", State.FINE, found)
    yield _cuda_engine()
    num = len(jax.local_devices())
    wanted = 2 * num
    try:
        threads = settings.pool_threads() or len(os.sched_getaffinity(0))
    except ValueError:
        return
    if threads < wanted:
        text = (
            f"{threads} for {num} devices: with more than 32 programs in "
            "flight jaxlib itself stops for ever. Set "
            f"NPROC={_POOL_THREADS_EACH * num} before jax starts."
        )
        yield Finding("jaxlib threads", State.WARNING, text)
    else:
        text = f"{threads} for {num} devices"
        yield Finding("jaxlib threads", State.FINE, text)


def _cuda_engine():
    """Where no GPU is used: whether programs may be lowered for one."""
    reason = cuda.why_not()
    text = "built; there are no CUDA devices here" if reason is None else reason
    return Finding("CUDA engine", State.NOTE, text)


def _gpus():
    """The GPUs of this process, what drives them, and whether they reach each other."""
    reason = cuda.why_not()
    if reason is not None:
        yield Finding("CUDA engine", State.FAULT, f"calls run plain jax.lax: {reason}")
        return
    native = cuda.load()
    major, minor = divmod(native.driver_version(), 1000)
    text = f"for CUDA {major}.{minor // 10}"
    yield Finding("CUDA driver", State.FINE, text)
    library = native.cublaslt()
    text = f"version {library['version']}, {library['path']}"
    yield Finding("cuBLASLt", State.FINE, text)
    devices = cuda.usable_devices()
    for one in devices:
        major, minor = one["compute_capability"]
        text = (
            f"{one['name']}, sm_{major}{minor}, {one['num_sms']} multiprocessors, "
            f"{one['num_copy_engines']} copy engines, "
            f"{one['memory_bytes'] / (1 << 30):.1f} GiB, "
            f"{'multicast' if one['has_multicast'] else 'no multicast'}"
        )
        yield Finding(f"GPU {one['ordinal']}", State.FINE, text)
    yield _peers([one["ordinal"] for one in devices])
    text = (
        "in heaps of jax_ub's own, by the first of vmm, fabric and ipc that all can "
        "use; not by XLA's communicators and windows (docs/gpu.md says why)"
    )
    yield Finding("shared memory", State.NOTE, text)


def _peers(ordinals):
    if len(ordinals) == 1:
        return Finding("peer access", State.NOTE, "one GPU in this process")
    rows = cuda.load().peers(ordinals)
    apart = [
        f"{one} to {other}"
        for one, row in zip(ordinals, rows, strict=True)
        for other, can in zip(ordinals, row, strict=True)
        if not can
    ]
    if not apart:
        text = f"all {len(ordinals)} GPUs of this process reach each other"
        return Finding("peer access", State.FINE, text)
    return Finding("peer access", State.WARNING, f"none from GPU {', '.join(apart)}")


def _trial_mesh(together):
    """A few devices of this process, or all devices of all."""
    devices = jax.devices() if together else jax.local_devices()[:_TRIAL_DEVICES]
    return Mesh(np.array(devices), (_TRIAL_AXIS,))


def _trials(mesh):
    for method in Method:
        yield _trial(mesh, method)


def _trial(mesh: Mesh, method: Method) -> Finding:
    """Runs one small AG+GEMM and compares it with numpy's product."""
    name = f'method "{method.value}"'
    x = np.ones((8 * mesh.size, 16), np.float32)
    w = np.ones((16, 8 * mesh.size), np.float32)
    try:
        y = _column_linear(mesh, method)(x, w)
        mine = [(np.asarray(part.data), part.index) for part in y.addressable_shards]
    except Exception as error:  # Whatever it is, the report is where it belongs.
        state = _state_of(method, mesh.local_devices)
        return Finding(name, state, f"{type(error).__name__}: {error}")
    if not all(np.array_equal(part, (x @ w)[index]) for part, index in mine):
        return Finding(name, State.FAULT, "runs, but its numbers are wrong")
    return Finding(name, State.FINE, f"runs on {mesh.size} devices")


def _column_linear(mesh, method):
    spec = PartitionSpec
    function = functools.partial(
        all_gather_matmul, axis_name=_TRIAL_AXIS, method=method
    )
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(spec(_TRIAL_AXIS, None), spec(None, _TRIAL_AXIS)),
            out_specs=spec(None, _TRIAL_AXIS),
        )
    )


def _between_processes():
    """What processes of a host need to share memory."""
    host = hosts.short_name(hosts.identity())
    try:
        engine.load().endpoint()
    except ImportError:
        return
    except RuntimeError as error:
        yield Finding("between processes", State.FAULT, str(error))
    else:
        text = f"can share memory with others on host {host!r}"
        yield Finding("between processes", State.FINE, text)


def _connections():
    """How the ranks of each group share memory, and what they would have preferred."""
    failed = dict(communicators.failures())
    for connection in communicators.connections():
        name = f"devices {list(connection.group)}"
        where = f"processes {sorted(set(connection.processes))}"
        if connection.group in failed:
            yield Finding(name, State.FAULT, f"{where}: {failed[connection.group]}")
        elif connection.reason is not None:
            text = f'{where}: "auto" is plain jax.lax, since {connection.reason}'
            yield Finding(name, State.WARNING, text)
        else:
            yield Finding(name, State.FINE, f"{where}: {_connected(connection)}")


def _connected(connection):
    """How, and what would have been preferred."""
    how = getattr(connection.communicator, "how", None)
    if how is None:
        return "connected"
    preferred = [
        f"; not by {way}: {reason}"
        for way, reason in connection.communicator.step_downs
    ]
    nvls = " with nvls" if connection.communicator.has_multicast else ""
    return f"connected by {how}{nvls}{''.join(preferred)}"


def _named_overlaps(together):
    """The names of `initialize_ub` and their methods; the defaults if it has none."""
    if overlaps.domains():
        yield from _connections()
        yield from map(_finding_of, overlaps.domains())
        return
    mesh = _trial_mesh(together)
    try:
        initialize_ub((8 * mesh.size, 16), mesh.size, mesh=mesh, axis_name=_TRIAL_AXIS)
    except Exception as error:  # Whatever it is, the report is where it belongs.
        yield Finding("initialize_ub", State.FAULT, f"{type(error).__name__}: {error}")
        return
    yield from _connections()
    if together:
        yield from _trials(mesh)
    (domain,) = overlaps.domains()
    text = f"not called here; the defaults are {_methods_of(domain)}"
    destroy_ub()
    yield Finding("initialize_ub", State.NOTE, text)


def _finding_of(domain):
    axes = ", ".join(domain.axis_name)
    text = (
        f"{domain.tp_size} ranks, [T, H] = {list(domain.shape)}: {_methods_of(domain)}"
    )
    return Finding(f"axis {axes}", State.FINE, text)


def _methods_of(domain):
    by_method: dict[str, list[str]] = {}
    for name, mode in domain.overlaps:
        method = domain.overlaps[name, mode].method
        by_method.setdefault(f"{method} ({mode.name})", []).append(name)
    return "; ".join(f"{one}: {', '.join(names)}" for one, names in by_method.items())


def _fallbacks():
    """The calls of this process that were not overlapped, by reason."""
    by_reason: dict[str, list[str]] = {}
    for fallback in fallbacks():
        by_reason.setdefault(fallback.reason, []).append(fallback.label)
    for reason, labels in by_reason.items():
        text = f"{len(labels)} calls, the last {labels[-1]}: {reason}"
        yield Finding("not overlapped", State.WARNING, text)


def _state_of(method, devices):
    """How bad it is that a method does not run: not all run everywhere."""
    platform = cuda.platform_of(devices[0])
    if platform == "cuda":
        expected = method is not Method.DIRECT and cuda.why_not() is None
    else:
        expected = platform == "cpu"
    return State.FAULT if expected else State.NOTE
