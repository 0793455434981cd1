"""Defines a benchmark case: programs that compute the same result, and limits for them.

A limit is a program that computes only a part of the result, such as the GEMM without
communication. It shows how fast the whole computation could be at best.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src.fp8 import recipes
from jax_ub._src.fp8.recipes import Recipe
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import Ranks, Spec
from jax_ub._src.tools.programs import DEFAULT_SHAPES, PALLAS
from jax_ub._src.tools.timing import PEAK, Candidate, peak_candidates

# Names of the timed programs in the benchmark's tables and JSON.
OWN = "jax_ub"
BEST = "xla_best"
NAIVE = "xla_naive"
RING = "xla_ring"
ONEDNN = "onednn"
UNFUSED = "unfused"
PLAIN = "plain_gemm"
COPY = "copy"
# Name of the program with which calls of several processes are compared. One process
# runs the same op on the same number of devices. Its speed is an upper bound.
IN_PROCESS = "in_process"
# Names of the programs with which FP8 calls are compared. `BF16` is jax_ub's call of
# the same shape in bf16. `XLA_F8` has XLA's dots of FP8 values. `XLA_QDQ` has XLA's
# dots of bf16 values that were quantized to FP8 and dequantized.
BF16 = "bf16"
XLA_F8 = "xla_f8"
XLA_QDQ = "xla_qdq"
PEERS = (BEST, NAIVE, RING, ONEDNN, UNFUSED, PALLAS, BF16, XLA_F8, XLA_QDQ)
LIMITS = (PLAIN, COPY, IN_PROCESS, PEAK)

# Maps the values of --dtypes that select FP8 operands to FP8 recipes. The recipes have
# one scale per tensor, per block and per row, in this order.
FP8_RECIPES: dict[str, Recipe] = {
    "fp8": recipes.Float8CurrentScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "rowwise": recipes.RowwiseScaling(),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `python -m jax_ub bench`, checked and completed with defaults."""

    ops: tuple[str, ...]
    devices: tuple[int, ...] = (1, 2, 4, 8)
    dtypes: tuple[str, ...] = ("bf16", "f32")  # short names
    shapes: tuple[Shape, ...] = DEFAULT_SHAPES
    rounds: int = 11
    patience: int = 1
    variants: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that benchmark programs allocate in addition to operands and results.

    `own_bytes` and `peer_bytes` are temporary buffers of jax_ub's program and of XLA's
    best one. `avoided_bytes` is the size of a buffer that jax_ub does not allocate:
    the gathered x [M, K], each rank's partial sums [M, N], or the temporary buffers of
    the unfused operations. `workspace_bytes` is the communication memory that the
    engine holds in this process, and `residual_bytes` is what jax_ub's program saves
    for its backward pass, per device.
    """

    own_bytes: int
    peer_bytes: int
    avoided_bytes: int
    workspace_bytes: int = 0
    residual_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A benchmark case: one op at one size, and all programs that compute it.

    Attributes:
        variant: distinguishes cases that have the same op and shape.
        flops: floating-point operations per call.
        candidates: those named in `LIMITS` compute only part of the result.
        notes: states what could not be measured, and why.
        fp8_rounding: the relative distance of neighboring FP8 numbers, if programs
            quantize arrays within a call; 0 if they quantize none.
    """

    op: str
    variant: str
    dtype: str
    num_ranks: int
    shape: Shape
    flops: int
    candidates: list[Candidate]
    memory: Memory | None = None
    notes: tuple[str, ...] = ()
    num_processes: int = 1
    fp8_rounding: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}".strip()

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape} {self.dtype} P={self.num_ranks}"

    def __getitem__(self, name: str) -> Candidate:
        return next(c for c in self.candidates if c.name == name)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The ranks and the dtype for which benchmark cases are built.

    `variants` selects variants of the op "gemm", such as "nn+bias"; an empty tuple
    selects all of them.
    """

    ranks: Ranks
    dtype: str
    variants: tuple[str, ...] = ()

    def case(
        self,
        op: str,
        shape: Shape,
        candidates: Sequence[Candidate | str],
        *,
        num_gemms: int = 1,
        variant: str = "",
        **more: Any,
    ) -> Case:
        """Returns a benchmark case. On CPUs, adds the peak rate as a candidate.

        A text among the candidates says why a program cannot run. The FLOPs of a call
        are those of `num_gemms` GEMMs of size `shape`. Without FLOPs, the peak rate is
        not added.
        """
        flops = num_gemms * shape.flops
        every = [c for c in candidates if not isinstance(c, str)]
        every += peak_candidates(self.ranks.platform, wide_dtype(self.dtype), flops)
        return Case(
            *(op, variant, self.dtype, self.ranks.num_ranks, shape, flops, every),
            notes=tuple(c for c in candidates if isinstance(c, str)),
            num_processes=jax.process_count(),
            **more,
        )


def wide_dtype(dtype: str) -> str:
    """Returns the dtype of a case's results: bf16 if `dtype` is FP8, else `dtype`."""
    return "bfloat16" if dtype in FP8_RECIPES else dtype


def copy_limit(num_bytes: int) -> Candidate:
    """Returns a program that copies `num_bytes`. No program of the case is faster.

    The copy runs on one device, and reads and writes `num_bytes` in total.
    """
    source = Ranks(1).place(np.zeros(max(1, num_bytes // 8), np.float32), Spec())
    return Candidate(COPY, jax.jit(jnp.negative), [source])


def temp_bytes(candidate: Candidate) -> int:
    compiled = candidate.program.lower(*candidate.operands).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def check_agreement(case: Case) -> None:
    """Raises an error unless all programs of a case have equal results, up to rounding.

    Programs with FP8 operands are compared with XLA's program on the same operands,
    dequantized to bf16.
    """
    results = {
        c.name: [_host(leaf) for leaf in jax.tree.leaves(c())]
        for c in case.candidates
        if c.name in (OWN, *PEERS) and c.name != BF16
    }
    best = next(name for name in (BEST, XLA_QDQ, OWN) if name in results)
    sizes = dataclasses.astuple(case.shape)
    bound = tolerance(wide_dtype(case.dtype), max(sizes))
    # Values that differ by rounding may be quantized to neighboring FP8 numbers. Then
    # one term of a sum differs. A sum of n terms is about sqrt(n) times as large as a
    # typical term. The factor 2 is for the largest terms, which are about twice as
    # large as a typical term.
    bound += 2 * case.fp8_rounding / min(sizes) ** 0.5
    for name, found in results.items():
        for x, y in zip(found, results[best], strict=True):
            error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
            if not error <= bound:
                raise ArithmeticError(
                    f"bench: {case.title}: {name} differs from {best} by {error:.2e} "
                    f"of the largest value, more than {bound:.2e}. One of them is "
                    "wrong; run the tests of the op."
                )


def tolerance(dtype: str, contracting: int) -> float:
    """Returns the largest relative error that rounding alone may cause.

    Candidates round to `dtype` a few times and sum `contracting` products in f32, in
    different orders. The error is relative to the largest value.
    """
    rounding = float(jnp.finfo(jnp.dtype(dtype)).eps)
    return 8 * rounding + float(np.finfo(np.float32).eps) * contracting**0.5


def _host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Converts an array, or the first local shard of a multi-process array, to f64."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)
    return np.asarray(array).astype(np.float64)
