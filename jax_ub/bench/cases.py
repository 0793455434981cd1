"""One comparison: the same result from several programs, and what it is judged by."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub.bench.devices import AXIS, Ranks, Spec
from jax_ub.bench.dots import FastestDots
from jax_ub.bench.timing import Candidate
from jax_ub.bench.workloads import Shape

OWN = "jax_ub"
BEST = "xla_best"
NAIVE = "xla_naive"
RING = "xla_ring"
ONEDNN = "onednn"
UNFUSED = "unfused"
PLAIN = "plain_gemm"
COPY = "copy"
# The same op on as many devices of one process.
IN_PROCESS = "in_process"
# The operations alone, in tiles that stay in the first cache.
PEAK = "peak"
# What XLA takes to launch any program on all devices, and on one.
LAUNCH = "launch"
LAUNCH_ONE = "launch_one"
LAUNCHES = (LAUNCH, LAUNCH_ONE)
# The share of the plain GEMM without the launches of both.
PLAIN_APART = "plain_gemm_launches_apart"

# How the way that people write it is named where it is the fastest one.
AS_WRITTEN = "as people write it"

PEERS = (BEST, NAIVE, RING, ONEDNN, UNFUSED)
LIMITS = (PLAIN, COPY, IN_PROCESS, PEAK)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a program allocates beside operands and results, on each device.

    Attributes:
        own_bytes: temporary buffers of jax_ub's program.
        peer_bytes: temporary buffers of XLA's best program.
        avoided: what jax_ub does not allocate, in words.
        avoided_bytes: the size of that.
        workspace_bytes: what the engine itself holds for communication, in the process.
    """

    own_bytes: int
    peer_bytes: int
    avoided: str
    avoided_bytes: int
    workspace_bytes: int


@dataclasses.dataclass
class Case:
    """One op at one size, and everything that computes it.

    Attributes:
        op: the name on the command line.
        variant: what sets it apart from other cases of the op and the shape.
        dtype: of the operands.
        num_ranks: P.
        shape: the global sizes.
        flops: operations of one call.
        candidates: what is timed; the limits compute less than the others.
        calls: how many calls a program chains; the time of one is the difference to
            the program of one call, `<name>_once`, over the calls that it has more.
        memory: what the programs allocate, where that is compared.
        notes: what is missing, and why.
        num_processes: that the ranks lie in.
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
        """Names the case in messages."""
        name = f"{self.op} {self.variant}".strip()
        return f"{name} {self.shape} {self.dtype} P={self.num_ranks}"


@dataclasses.dataclass(frozen=True)
class Place:
    """What cases are made for: the devices, the dtype, the method under test.

    Of the GEMM alone, `variants` says which; none means all of them.
    """

    ranks: Ranks
    dtype: str
    method: str
    dots: FastestDots
    variants: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """P."""
        return self.ranks.num_ranks


def copy_limit(num_bytes: int) -> Candidate:
    """A copy that reads and writes `num_bytes` together."""
    source = Ranks(1).place(np.zeros(max(1, num_bytes // 8), np.float32), Spec())
    return Candidate(COPY, jax.jit(jnp.negative), [source])


def launches(ranks: Ranks) -> list[Candidate]:
    """Programs that do next to nothing, on all devices and on the plain GEMM's one."""

    def launch(name: str, ranks: Ranks) -> Candidate:
        program = ranks.program(lambda x: x + 1, (Spec(AXIS),), Spec(AXIS))
        return Candidate(
            name, program, [ranks.place(np.zeros(ranks.num_ranks), Spec(AXIS))]
        )

    return [launch(LAUNCH, ranks), launch(LAUNCH_ONE, Ranks(1))]


def temp_bytes(candidate: Candidate) -> int:
    """Temporary buffers of a program on each device, as XLA's compiler planned them."""
    compiled = candidate.program.lower(*candidate.operands).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def check_agreement(case: Case) -> None:
    """Runs everything once and compares the results with those of XLA's best program.

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
    """How far two right results may be apart, relative to the largest value.

    Both round their results a few times to `dtype`, and sum `contracting` f32 products
    in different orders.
    """
    rounding = float(jnp.finfo(jnp.dtype(dtype)).eps)
    summing = float(np.finfo(np.float32).eps) * contracting**0.5
    return 8 * rounding + summing


def _host(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


Builder = Callable[[Place, Shape], list[Case]]
