"""Records the environment of a benchmark: versions, machine and engine settings."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from jax_ub._src.runtime import cpu_engine

_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy")


def record() -> dict[str, Any]:
    """Returns a run's environment for its JSON file: versions, machine, engine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "engine": engine_settings(),
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of relevant packages; None if missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Returns the processor, usable cores, memory, load average and devices."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "devices": len(jax.devices()),
        "device_kind": jax.devices()[0].device_kind,  # "cpu", "NVIDIA H100 80GB HBM3"
    }


def engine_settings() -> dict[str, Any]:
    """Returns the CPU engine's instruction set and number of threads."""
    cpu = cpu_engine.load()
    return {"isa": cpu.isa(), "threads": cpu.num_threads()}


def commit() -> str | None:
    """Returns the git commit of this source, or None if it cannot be found.

    The suffix "-dirty" says that files differ from the commit.
    """
    here = pathlib.Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    words = ("model name", "cpu family", "model")
    return ", ".join(
        value if word == "model name" else f"{word} {value}"
        for word in words
        if (value := fields.get(word, ""))
    )
