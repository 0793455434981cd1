"""Builds benchmark cases of local GEMMs, `ub.dgrad_add` and `ub.wgrad_accumulate`."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_ub as ub
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.matmuls import matmul, wgrad
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Setup
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import COLUMNS, ROWS, Spec, normal
from jax_ub._src.tools.timing import Candidate, fastest

VARIANTS = ("nn", "nn+bias", "nn+add", "nt", "nt+bias", "nt+add", "tn", "tn+add")
# A function of (a, b, bias, addend) that returns the product of a and b, plus the bias
# or the addend unless they are None.
Gemm = Callable[..., jax.Array]


def own_gemm(choice: MethodChoice, layout: str, out_dtype: str | None = None) -> Gemm:
    """Returns jax_ub's local GEMM: a b for layout "nn", a b^T for "nt", a^T b for "tn".

    `out_dtype` defaults to f32 if a wgrad has an addend, and to the operands' dtype
    otherwise.
    """
    execution = Execution(label=f"local GEMM {layout}", choice=choice)

    def program(a, b, bias=None, addend=None):
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


def gemm(setup: Setup, shape: Shape) -> list[Case]:
    """Returns benchmark cases of GEMMs without communication, on one rank only."""
    variants = setup.variants or VARIANTS if setup.num_ranks == 1 else ()
    return [_case(setup, shape, "gemm", variant) for variant in variants]


def dgrad_add(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark case of `residual + dy w^T` in place, with sharded rows."""

    def own(dy, w, _, residual):
        return ub.dgrad_add(dy, w, residual)

    return [_case(setup, shape, "dgrad_add", "nt+add", own)]


def wgrad_accumulate(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark case of `main_grad + x^T dy` in place, with sharded dy."""

    def own(x, dy, _, main_grad):
        return ub.wgrad_accumulate(x, dy, main_grad)

    return [_case(setup, shape, "wgrad_accumulate", "tn+add", own)]


def _case(
    setup: Setup, shape: Shape, op: str, variant: str, public: Gemm | None = None
) -> Case:
    """Returns the benchmark case of a GEMM variant, such as "nt+bias".

    With method "auto", jax_ub's program is `public`, if that is given.
    """
    layout, _, added = variant.partition("+")
    out_dtype = "float32" if layout == "tn" and added else setup.dtype
    candidate, draw = _candidates(setup, shape, layout, added, out_dtype)
    choice = MethodChoice(Method(setup.method))
    # `public`, such as `ub.dgrad_add`, has no argument `method` and always uses "auto".
    # With another method, the benchmark calls the primitive below it.
    own = public if public and setup.method == "auto" else own_gemm(choice, layout)
    platform = setup.ranks.platform
    dots = peers.dot_variants(layout, setup.dtype, platform)
    best = fastest(
        [candidate(cases.BEST, _in_xla(dot, out_dtype), str(dot)) for dot in dots]
    )
    candidates = [
        candidate(cases.OWN, own),
        # The trials that found the fastest program added their results to the donated
        # addend, so it is drawn again.
        dataclasses.replace(best, operands=draw()),
        candidate(cases.NAIVE, _in_xla(dots[0], out_dtype)),
        cases.copy_limit(shape.bytes(setup.dtype)),
    ]
    notes: tuple[str, ...] = ()
    out = shape.sizes(peers.LAYOUTS[layout][2])
    if op != "gemm":
        plain = own_gemm(choice, layout, out_dtype)
        without, _ = _candidates(setup, shape, layout, "", out_dtype)
        candidates.append(without(cases.PLAIN, plain))
    elif platform == "cpu":
        onednn = peers.find_onednn(setup.dtype, layout)
        if isinstance(onednn, str):
            notes = (onednn,)
        else:
            candidates.append(_in_onednn(onednn, draw(), out, added))
    return setup.case(op, shape, candidates, variant=variant, notes=notes)


def _candidates(setup, shape, layout, added, out_dtype):
    """Returns two functions: one makes a program to time, one draws its operands.

    The operands are a, b and a bias or an addend. The result replaces an addend.
    """
    left, right, out = map(shape.sizes, peers.LAYOUTS[layout])
    # Rows are sharded over the ranks. A wgrad sums over rows, so the columns of dy are
    # sharded instead.
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
    carry = 2 if added == "add" else None

    def draw() -> list[jax.Array]:
        return list(map(setup.ranks.place, arrays, specs))

    def candidate(name: str, function: Gemm, variant: str = "") -> Candidate:
        def program(a, b, third=None):
            return function(a, b, *((None, third) if carry else (third, None)))

        donated = (carry,) if carry else ()
        jitted = setup.ranks.program(program, specs, out_spec, donated)
        return Candidate(name, jitted, draw(), variant, carry)

    return candidate, draw


def _in_xla(dot, out_dtype):
    def program(a, b, bias, addend):
        added = bias if addend is None else addend
        if added is None:
            return dot(a, b, out_dtype)
        return (added.astype(jnp.float32) + dot(a, b, jnp.float32)).astype(out_dtype)

    return program


def _in_onednn(gemm, operands, out, added):
    a, b, *third = map(np.asarray, operands)
    y = np.zeros(out, np.float32)
    if third:
        y[:] = third[0]

    def program():
        if added == "bias":
            y[:] = third[0]
        gemm(a, b, y, 1.0 if third else 0.0)
        return y

    return Candidate(cases.ONEDNN, program, [])
