"""Checks the devices, their drivers and jaxlib's thread pool."""

import os
from collections.abc import Iterator

import jax

from jax_ub._src.runtime import cuda_engine, settings
from jax_ub._src.tools.doctor.finding import Finding, State
from jax_ub._src.tools.doctor.trials import POOL_THREADS_EACH


def devices() -> Iterator[Finding]:
    """Yields findings about JAX's devices: number, kind, and the GPUs' drivers.

    On CPUs, it also checks that jaxlib's thread pool is large enough for the devices.
    """
    everywhere = jax.devices()
    platform = cuda_engine.platform_of(everywhere[0])
    found = f"{len(everywhere)} {platform}"
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
            f"NPROC={POOL_THREADS_EACH * num} before jax starts."
        )
        yield Finding("jaxlib threads", State.WARNING, text)
    else:
        text = f"{threads} for {num} devices"
        yield Finding("jaxlib threads", State.FINE, text)


def _cuda_engine():
    """Returns a finding: whether the CUDA engine is built, where JAX uses no GPU."""
    reason = cuda_engine.why_not()
    text = "built; there are no CUDA devices here" if reason is None else reason
    return Finding("CUDA engine", State.NOTE, text)


def _gpus():
    """Yields findings about this process's GPUs, driver, cuBLASLt and peer access."""
    reason = cuda_engine.why_not()
    if reason is not None:
        yield Finding("CUDA engine", State.FAULT, f"calls run plain jax.lax: {reason}")
        return
    native = cuda_engine.load()
    major, minor = divmod(native.driver_version(), 1000)
    text = f"for CUDA {major}.{minor // 10}"
    yield Finding("CUDA driver", State.FINE, text)
    library = native.cublaslt()
    text = f"version {library['version']}, {library['path']}"
    yield Finding("cuBLASLt", State.FINE, text)
    devices = cuda_engine.usable_devices()
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
    rows = cuda_engine.load().peers(ordinals)
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
