"""Defines a benchmark case: programs that compute the same result, and limits for them.

A limit is a program that computes only a part of the result, such as the GEMM without
communication. It shows how fast the whole computation could be at best.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec
from jax_ub._src.tools.bench.dots import FastestDots
from jax_ub._src.tools.bench.timing import Candidate
from jax_ub._src.tools.bench.workloads import Shape

OWN = "jax_ub"
BEST = "xla_best"
NAIVE = "xla_naive"
RING = "xla_ring"
ONEDNN = "onednn"
UNFUSED = "unfused"
PLAIN = "plain_gemm"
COPY = "copy"
# Limit of multi-process cases: the same op and number of devices, in one process.
IN_PROCESS = "in_process"
# Limit: the time of the FLOPs at the peak rate, on tiles that stay in the L1 cache.
PEAK = "peak"
# Nearly empty programs, which measure XLA's launch time on all devices and on one.
LAUNCH = "launch"
LAUNCH_ONE = "launch_one"
LAUNCHES = (LAUNCH, LAUNCH_ONE)
# Name of a result: the plain GEMM's time divided by jax_ub's time, after each program's
# launch time is subtracted.
PLAIN_APART = "plain_gemm_launches_apart"

# Description of XLA's naive program in tables, where it is XLA's fastest variant.
AS_WRITTEN = "as people write it"

PEERS = (BEST, NAIVE, RING, ONEDNN, UNFUSED)
LIMITS = (PLAIN, COPY, IN_PROCESS, PEAK)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that programs allocate per device in addition to operands and results.

    Attributes:
        own_bytes: temporary buffers of jax_ub's program.
        peer_bytes: temporary buffers of XLA's best program.
        avoided: describes the buffer that jax_ub does not allocate.
        avoided_bytes: size of that buffer.
        workspace_bytes: communication memory that the engine holds in this process.
    """

    own_bytes: int
    peer_bytes: int
    avoided: str
    avoided_bytes: int
    workspace_bytes: int


@dataclasses.dataclass
class Case:
    """One op at one size, with all programs that compute it and are timed together.

    Attributes:
        op: name on the command line.
        variant: distinguishes cases that have the same op and shape.
        dtype: dtype of the operands.
        num_ranks: tensor-parallel size P.
        shape: global sizes.
        flops: floating-point operations per call.
        candidates: the timed programs; those named in `LIMITS` compute only part of
            the result.
        calls: if 1, a program makes one call. Otherwise, the program `<name>` chains
            1 + `calls` calls, `<name>_once` makes one call, and the time per call is
            the difference of their times divided by `calls`.
        memory: memory of the programs; None if it is not compared.
        notes: states what could not be measured, and why.
        num_processes: number of processes that the ranks are distributed over.
    """

    op: str
    variant: str
    dtype: str
    num_ranks: int
    shape: Shape
    flops: int
    candidates: list[Candidate]
    calls: int = 1
    memory: Memory | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    num_processes: int = 1

    @property
    def title(self) -> str:
        """Returns the op, variant, sizes, dtype and P of the case, for messages."""
        name = f"{self.op} {self.variant}".strip()
        return f"{name} {self.shape} {self.dtype} P={self.num_ranks}"


@dataclasses.dataclass(frozen=True)
class Place:
    """The configuration to build cases for: devices, dtype and method under test.

    `dots` measures and caches XLA's fastest GEMM. `variants` selects GEMM variants,
    such as "nn+bias", for the op "gemm"; an empty tuple selects all of them.
    """

    ranks: Ranks
    dtype: str
    method: str
    dots: FastestDots
    variants: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Returns the tensor-parallel size P."""
        return self.ranks.num_ranks


def copy_limit(num_bytes: int) -> Candidate:
    """Returns a program to compare with, which reads and writes `num_bytes` in total.

    It negates an f32 array on one device.
    """
    source = Ranks(1).place(np.zeros(max(1, num_bytes // 8), np.float32), Spec())
    return Candidate(COPY, jax.jit(jnp.negative), [source])


def launches(ranks: Ranks) -> list[Candidate]:
    """Returns two nearly empty programs that measure XLA's launch time.

    One runs on all devices of `ranks`, the other on one device.
    """

    def launch(name: str, ranks: Ranks) -> Candidate:
        program = ranks.program(lambda x: x + 1, (Spec(AXIS),), Spec(AXIS))
        return Candidate(
            name, program, [ranks.place(np.zeros(ranks.num_ranks), Spec(AXIS))]
        )

    return [launch(LAUNCH, ranks), launch(LAUNCH_ONE, Ranks(1))]


def temp_bytes(candidate: Candidate) -> int:
    """Returns the bytes of temporary buffers per device, from XLA's memory analysis."""
    compiled = candidate.program.lower(*candidate.operands).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def check_agreement(case: Case) -> None:
    """Runs every candidate once and compares its result with the result of `xla_best`.

    Raises:
        ArithmeticError: if a result differs by more than rounding can explain.
    """
    judged = [c for c in case.candidates if c.name not in (*LIMITS, *LAUNCHES)]
    results = {c.name: [_host(leaf) for leaf in jax.tree.leaves(c())] for c in judged}
    wanted = results[BEST]
    bound = tolerance(case.dtype, max(case.shape.K, case.shape.N, case.shape.M))
    for name, found in results.items():
        if name.endswith("_once"):
            continue
        for x, y in zip(found, wanted, strict=True):
            worst = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
            if not worst <= bound:
                raise ArithmeticError(
                    f"bench: {case.title}: {name} differs from {BEST} by {worst:.2e} "
                    f"of the largest value, more than {bound:.2e}. One of them is "
                    "wrong; run the tests of the op."
                )


def tolerance(dtype: str, contracting: int) -> float:
    """Returns the largest error of a correct result, relative to the largest value.

    Candidates round to `dtype` a few times and sum `contracting` products in f32, in
    different orders.
    """
    rounding = float(jnp.finfo(jnp.dtype(dtype)).eps)
    summing = float(np.finfo(np.float32).eps) * contracting**0.5
    return 8 * rounding + summing


def _host(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


Builder = Callable[[Place, Shape], list[Case]]
