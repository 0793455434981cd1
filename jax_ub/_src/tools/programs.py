"""Programs that both `bench` and `tune` time, and their sizes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub._src.methods import MethodChoice, PallasTiles
from jax_ub._src.primitives import pallas
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.matmuls import matmul, wgrad
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, Ranks
from jax_ub._src.tools.timing import Candidate

# Name of JAX's Pallas kernel in tables and JSON.
PALLAS = "pallas"
# Default GEMM sizes M, K, N. The first two are the MLP of Llama 2 7B (K = 4096, N =
# 11008) with K and N reduced to about a third and a quarter. The third is a fused
# query, key and value kernel with fewer key than query heads. The fourth has few rows,
# as in decoding. Each bf16 GEMM takes 1 to 20 ms on two recent cores, and 2 to 80 ms on
# older ones.
DEFAULT_SHAPES = (
    Shape(1536, 1280, 3840),
    Shape(512, 1024, 2816),
    Shape(1024, 1024, 1536),
    Shape(64, 1024, 2816),
)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Turns per-device functions into programs to time, all with the same operands.

    Attributes:
        operands: global arrays.
        carry: index of an operand that a program's result replaces after each call.
            Each program gets a copy of it.
    """

    ranks: Ranks
    operands: Sequence[Any]
    in_specs: Sequence[Any]
    out_specs: Any
    carry: int | None = None

    def __call__(
        self, name: str, function: Callable[..., Any], variant: Any = None
    ) -> Candidate:
        donated = () if self.carry is None else (self.carry,)
        program = self.ranks.program(function, self.in_specs, self.out_specs, donated)
        return Candidate(name, program, self._fresh(), variant, self.carry)

    def fastest(
        self, name: str, functions: Mapping[Any, Callable[..., Any]]
    ) -> Candidate:
        """Times the programs of {variant: function}, and returns the fastest."""
        variants = [self(name, f, variant) for variant, f in functions.items()]
        found = self.ranks.fastest(variants)
        # The operand with index `carry` is created again, because the trials have
        # replaced it.
        return dataclasses.replace(found, operands=self._fresh())

    def _fresh(self):
        found = list(self.operands)
        if self.carry is not None:
            spec = self.in_specs[self.carry]
            found[self.carry] = self.ranks.place(found[self.carry], spec)
        return found


# A function of (a, b) that returns the product, or of (a, b, addend) that returns the
# product plus the addend.
Gemm = Callable[..., jax.Array]


def own_gemm(
    choice: MethodChoice,
    layout: str,
    out_dtype: str | None = None,
    *,
    adds_bias: bool = False,
) -> Gemm:
    """Returns jax_ub's local GEMM: a b for layout "nn", a b^T for "nt", a^T b for "tn".

    A third operand is a bias if `adds_bias`, else an addend. `out_dtype` defaults to
    f32 if a wgrad has an addend, and to the operands' dtype otherwise.
    """
    execution = Execution(label=f"local GEMM {layout}", choice=choice)

    def program(a, b, added=None):
        bias, addend = (added, None) if adds_bias else (None, added)
        if layout == "tn":
            main_grads = None if addend is None else (addend,)
            out = out_dtype or (jnp.float32 if main_grads else a.dtype)
            return wgrad(execution, a, (b,), main_grads, out_dtype=out)[0]
        return matmul(
            *(execution, (a,), (b,), bias, addend),
            rhs_transposed=layout == "nt",
            out_dtype=out_dtype or a.dtype,
        )

    return program


def pallas_programs(
    shape: Shape, dtype: str, ranks: Ranks
) -> dict[PallasTiles, Callable[..., jax.Array]] | str:
    """Returns {tile sizes: JAX's Pallas all-gather + GEMM} for all tiles that fit.

    If the kernel cannot run on these devices or at this size, returns the reason.
    """
    sizes = shape.M, shape.K, shape.N
    reason = pallas.why_not(ranks.devices, dtype, *sizes)
    if reason is not None:
        return reason
    return {
        tiles: functools.partial(pallas.all_gather_matmul, axis_name=AXIS, tiles=tiles)
        for tiles in pallas.tiles_for(*sizes, ranks.num_ranks)
    }


def fastest_pallas(
    programs: Programs, shape: Shape, dtype: str
) -> tuple[Candidate, PallasTiles] | str:
    """Returns JAX's Pallas kernel and its fastest tiles, or why it cannot run."""
    found: Any = pallas_programs(shape, dtype, programs.ranks)
    if isinstance(found, str):
        return found
    try:
        best = programs.fastest(PALLAS, found)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return f"it failed: {str(error).splitlines()[0]}"
    return best, best.variant
