"""Builds benchmark cases of local GEMMs, `ub.dgrad_add` and `ub.wgrad_accumulate`."""

import jax.numpy as jnp
import numpy as np

import jax_ub as ub
from jax_ub._src.methods import MethodChoice, resolve
from jax_ub._src.runtime import settings
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Setup
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import COLUMNS, ROWS, Spec, normal
from jax_ub._src.tools.programs import Programs, own_gemm
from jax_ub._src.tools.timing import Candidate

# The variants of each op, named by the layout of the GEMM and by the array that is
# added. In a layout, "t" stands for a transposed operand. The public functions
# `ub.dgrad_add` and `ub.wgrad_accumulate` add the product to their last operand in
# place.
VARIANTS = {
    "gemm": ("nn", "nn+bias", "nn+add", "nt", "nt+bias", "nt+add", "tn", "tn+add"),
    "dgrad_add": ("nt+add",),
    "wgrad_accumulate": ("tn+add",),
}


def local(op: str, setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark cases of an op in `VARIANTS`, without communication.

    These are GEMMs on one rank only, `residual + dy w^T` with sharded rows, and
    `main_grad + x^T dy` with sharded columns of dy.
    """
    if op != "gemm":
        return [_case(setup, shape, op, *VARIANTS[op])]
    variants = setup.variants or VARIANTS[op] if setup.ranks.num_ranks == 1 else ()
    return [_case(setup, shape, op, variant) for variant in variants]


def _case(setup: Setup, shape: Shape, op: str, variant: str) -> Case:
    """Returns the benchmark case of a GEMM variant, such as "nt+bias"."""
    layout, _, added = variant.partition("+")
    out_dtype = "float32" if layout == "tn" and added else setup.dtype
    choice = MethodChoice(resolve(op, None, settings.method()))
    own = getattr(ub, op, own_gemm(choice, layout, adds_bias=added == "bias"))
    programs = _programs(setup, shape, layout, added, out_dtype)
    dots = peers.dot_variants(layout, setup.dtype, setup.ranks.platform)
    written = {dot: _in_xla(dot, out_dtype) for dot in dots}
    candidates: list[Candidate | str] = [
        programs(cases.OWN, own),
        programs.fastest(cases.BEST, written),
        programs(cases.NAIVE, next(iter(written.values()))),
        cases.copy_limit(shape.bytes(setup.dtype)),
    ]
    if op != "gemm":
        without = _programs(setup, shape, layout, "", out_dtype)
        candidates.append(without(cases.PLAIN, own_gemm(choice, layout, out_dtype)))
    elif setup.ranks.platform == "cpu":
        out = shape.sizes(peers.LAYOUTS[layout][2])
        candidates.append(_in_onednn(setup, layout, added, programs.operands, out))
    return setup.case(op, shape, candidates, variant=variant)


def _programs(setup, shape, layout, added, out_dtype):
    """Returns a builder of programs with operands a, b and perhaps a bias or addend.

    The result replaces an addend. Rows are sharded over the ranks. A wgrad sums over
    rows, so the columns of dy are sharded instead.
    """
    left, right, out = map(shape.sizes, peers.LAYOUTS[layout])
    is_wgrad = layout == "tn"
    out_spec = COLUMNS if is_wgrad else ROWS
    specs = [Spec(), out_spec] if is_wgrad else [out_spec, Spec()]
    scale = left[0 if is_wgrad else 1] ** -0.5
    arrays = [normal(0, left, setup.dtype), normal(1, right, setup.dtype, scale)]
    if added == "bias":
        specs.append(Spec())
        arrays.append(normal(2, out[1:], setup.dtype))
    if added == "add":
        specs.append(out_spec)
        arrays.append(normal(2, out, out_dtype))
    operands = [*map(setup.ranks.place, arrays, specs)]
    carry = 2 if added == "add" else None
    return Programs(setup.ranks, operands, specs, out_spec, carry)


def _in_xla(dot, out_dtype):
    def program(a, b, added=None):
        if added is None:
            return dot(a, b, out_dtype)
        return (added.astype(jnp.float32) + dot(a, b, jnp.float32)).astype(out_dtype)

    return program


def _in_onednn(setup, layout, added, operands, out):
    """Returns oneDNN's GEMM as a program, or the reason why oneDNN cannot run it."""
    gemm = peers.find_onednn(setup.dtype, layout)
    if isinstance(gemm, str):
        return gemm
    a, b, *third = map(np.asarray, operands)
    y = np.zeros(out, np.float32) + (third[0] if third else 0)

    def program():
        if added == "bias":
            y[:] = third[0]
        gemm(a, b, y, 1.0 if third else 0.0)
        return y

    return Candidate(cases.ONEDNN, program, [])
