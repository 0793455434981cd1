"""Devices and operands of a benchmark, and facts about the machine that it ran on."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.runtime import backend, cpu_engine, settings
from jax_ub._src.tools.options import load_extra

AXIS = "tp"
Spec = PartitionSpec
_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy")
# The shortest interval in which the CPU load is measured. The kernel counts CPU time in
# ticks of 10 ms, so shorter intervals are too coarse.
_MIN_INTERVAL_S = 0.1


def start(num_devices: int, platform: str | None = "cpu") -> None:
    """Starts the JAX backend and checks that it has at least `num_devices` devices.

    On CPUs, it requests this number from JAX, which works only before JAX has started.
    None as `platform` keeps JAX's default.
    """
    # jaxlib needs at least two pool threads per device when launches are queued.
    # oneDNN's OpenMP threads must sleep between calls. Otherwise they would spin on the
    # cores while the next candidate is timed.
    settings.set_pool_threads(4 * num_devices)
    settings.ask_openmp_to_sleep()
    if platform is not None:
        # JAX may have started already; the number of devices is checked below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", platform)
    backend.request_cpu_devices(num_devices)
    num_found = len(backend.start())
    if num_found < num_devices:
        raise UnsupportedOverlapError(
            f"bench: jax runs with {num_found} devices, and P = {num_devices} was "
            "asked for. Ask for fewer; on CPUs, start the benchmark in a process of "
            "its own: python -m jax_ub bench."
        )


class Ranks:
    """A 1D mesh of this process's first `num_ranks` devices, for benchmark programs."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks

    @property
    def devices(self) -> list[jax.Device]:
        return jax.local_devices()[: self.num_ranks]

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Copies a global array to new buffers on the mesh, sharded as `spec`."""
        return jax.device_put(np.asarray(array), NamedSharding(self.mesh, spec))

    def draw(
        self, dtype: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[Spec]
    ) -> list[jax.Array]:
        """Returns random normal arrays with the given global shapes and shardings."""
        drawn = (normal(seed, shape, dtype) for seed, shape in enumerate(shapes))
        return [self.place(x, spec) for x, spec in zip(drawn, specs, strict=True)]

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[PartitionSpec],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Jits a per-device function in `jax.shard_map` over the mesh.

        `donate` has the indices of the operands that are donated.
        """
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs
        )
        return jax.jit(mapped, donate_argnums=donate)


class ProcessRanks(Ranks):
    """A 1D mesh with one device of each process in a multi-process benchmark."""

    @property
    def devices(self) -> list[jax.Device]:
        return [jax.local_devices(process)[0] for process in range(self.num_ranks)]

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Places a global array, equal in all processes, on the mesh as `spec`."""
        array = np.asarray(array)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Returns a host array of normal random numbers times `scale`, in `dtype`.

    Equal arguments return equal arrays.
    """
    return _drawn(seed, shape, np.dtype(dtype), scale).copy()


# The drawn arrays are cached, because drawing an operand of size 8192 x 8192 takes
# seconds, and all programs of a benchmark case use copies of the same operands.
@functools.lru_cache(maxsize=8)
def _drawn(seed, shape, dtype, scale):
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (draws * np.float32(scale)).astype(dtype)


class BackgroundLoad:
    """Measures which share of the machine's CPU time other processes use.

    On a busy machine, a peer with many threads gets more CPU time than jax_ub's engine,
    which has one thread per core. Interleaving does not correct for this. Without
    psutil, the share is 0.

    Args:
        own_seconds: returns the CPU seconds of the benchmark so far.
    """

    def __init__(self, own_seconds: Callable[[], float] = time.process_time):
        self._own_seconds = own_seconds
        try:
            self._psutil = load_extra("psutil", "bench")
            self._psutil.cpu_percent()  # starts the first interval
        except UnsupportedOverlapError:
            self._psutil = None
        self._start, self._own = time.perf_counter(), own_seconds()
        self._share = 0.0

    def share(self) -> float:
        """Returns the share of all cores that other processes used since the last call.

        Calls within 0.1 s share one interval.
        """
        now, own = time.perf_counter(), self._own_seconds()
        elapsed = now - self._start
        if self._psutil is not None and elapsed >= _MIN_INTERVAL_S:
            busy = self._psutil.cpu_percent() / 100
            others = busy - (own - self._own) / (elapsed * (os.cpu_count() or 1))
            self._share = min(1.0, max(0.0, others))
            self._start, self._own = now, own
        return self._share


def environment() -> dict[str, Any]:
    """Returns versions, machine and engine of a benchmark run, as JSON types."""
    psutil = load_extra("psutil", "bench")
    cpu = cpu_engine.load()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": {
            "processor": _processor(),
            "cores": len(psutil.Process().cpu_affinity()),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": psutil.getloadavg()[0],
            "system": platform.platform(),
            "devices": len(jax.devices()),
            "device_kind": jax.devices()[0].device_kind,
        },
        "engine": {"isa": cpu.isa(), "threads": cpu.num_threads()},
    }


def _commit():
    """Returns the source tree's git commit, with "-dirty" if files differ, or None."""
    here = str(pathlib.Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = dict(re.findall(r"^([^\t\n]+)\s*: (.*)$", text, re.MULTILINE))
    labels = {"model name": "", "cpu family": "cpu family ", "model": "model "}
    return ", ".join(labels[name] + found[name] for name in labels if name in found)
