"""Builds the cases of local GEMMs, `ub.dgrad_add` and `ub.wgrad_accumulate`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ub as ub
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.tools.bench import cases, dots, onednn, peers
from jax_ub._src.tools.bench.cases import Case, Place
from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec, normal
from jax_ub._src.tools.bench.peak import at_peak
from jax_ub._src.tools.bench.timing import Candidate, fastest
from jax_ub._src.tools.bench.workloads import Shape

VARIANTS = ("nn", "nn+bias", "nn+add", "nt", "nt+bias", "nt+add", "tn", "tn+add")


def own_gemm(
    method: str, layout: str, out_dtype: str | None = None
) -> Callable[..., jax.Array]:
    """Returns jax_ub's local GEMM as a function (a, b, bias or None, addend or None).

    `layout` is "nn", "nt" or "tn", see `bench.dots`. `out_dtype` defaults to f32 if a
    wgrad has an addend, and to the operands' dtype otherwise.
    """
    choice = MethodChoice(Method(method))
    where: dict[str, Any] = {"choice": choice, "label": f"bench {layout}"}

    def program(a, b, bias, addend):
        if layout == "tn":
            main_grads = None if addend is None else (addend,)
            out = out_dtype or (jnp.float32 if main_grads else a.dtype)
            return wgrad(a, (b,), main_grads, out_dtype=out, **where)[0]
        transposed = layout == "nt"
        return matmul(
            (a,),
            (b,),
            bias,
            addend,
            rhs_transposed=transposed,
            out_dtype=out_dtype or a.dtype,
            **where,
        )

    return program


def plain_gemm(one: Ranks, method: str, dtype: str, shape: Shape) -> Candidate:
    """Returns a program to compare with: jax_ub's whole GEMM on one device.

    It has the FLOPs of all ranks together, but no communication.
    """
    specs = (Spec(), Spec())
    nn = own_gemm(method, "nn")
    program = one.program(lambda x, w: nn(x, w, None, None), specs, Spec())
    return Candidate(cases.PLAIN, program, one.draw(dtype, shape.operands, specs))


def local_shapes(layout: str, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the left operand, right operand and result of a GEMM.

    `layout` is fprop ("nn"), dgrad ("nt") or wgrad ("tn") of a layer of size `shape`.
    """
    x, w, y = (shape.M, shape.K), (shape.K, shape.N), (shape.M, shape.N)
    return {"nn": (x, w, y), "nt": (y, w, x), "tn": (x, y, w)}[layout]


def gemm(place: Place, shape: Shape) -> list[Case]:
    """Returns a case for each variant of a local GEMM, such as "nn+bias".

    The GEMM runs on one device, so the list is empty if there are several ranks.
    """
    if place.num_ranks > 1:
        return []
    variants = place.variants or VARIANTS
    return [_case(place, shape, "gemm", variant) for variant in variants]


def dgrad_add(place: Place, shape: Shape) -> list[Case]:
    """Returns the case of `ub.dgrad_add`, which adds a dgrad to a residual in place.

    It computes `residual + dy w^T`. The rows of `dy` and `residual` are sharded by
    rank.
    """
    return [
        _case(
            place,
            shape,
            "dgrad_add",
            "nt+add",
            lambda dy, w, _, r: ub.dgrad_add(dy, w, r),
        )
    ]


def wgrad_accumulate(place: Place, shape: Shape) -> list[Case]:
    """Returns the case of `ub.wgrad_accumulate`, which adds a wgrad in place.

    It computes `main_grad + x^T dy` in the buffer of `main_grad`. The columns of `dy`
    and `main_grad` are sharded by rank.
    """
    return [
        _case(
            place,
            shape,
            "wgrad_accumulate",
            "tn+add",
            lambda x, dy, _, g: ub.wgrad_accumulate(x, dy, g),
        )
    ]


def _case(place, shape, op, variant, public=None):
    build = _Build(place, shape, variant)
    # The public functions have no argument `method`. For other methods than "auto",
    # the program is built from the primitives that they call.
    own = public if place.method == "auto" else None
    own = own or own_gemm(place.method, build.layout)
    candidates = [
        build.candidate(cases.OWN, own),
        build.best(),
        build.candidate(cases.NAIVE, build.naive()),
    ]
    # oneDNN is compared on CPUs only.
    gemm_of = _onednn(build, place) if place.ranks.platform == "cpu" else None
    notes = [gemm_of] if isinstance(gemm_of, str) else []
    if op == "gemm" and isinstance(gemm_of, Candidate):
        candidates.append(gemm_of)
    if op != "gemm":
        plain = own_gemm(place.method, build.layout, build.out_dtype)
        candidates.append(build.without_addends().candidate(cases.PLAIN, plain))
    itemsize = np.dtype(place.dtype).itemsize
    candidates.append(cases.copy_limit(shape.bytes(itemsize)))
    candidates += at_peak(place.ranks, place.dtype, shape.flops)
    return Case(
        op=op,
        variant=variant,
        dtype=place.dtype,
        num_ranks=place.num_ranks,
        shape=shape,
        flops=shape.flops,
        candidates=candidates,
        notes=notes,
    )


class _Build:
    """Builds the programs and operands of one GEMM, with an optional bias or addend.

    Programs take (a, b), (a, b, bias) or (a, b, addend). An addend is donated: the
    result replaces it.
    """

    def __init__(self, place: Place, shape: Shape, variant: str):
        self.place, self.shape = place, shape
        self.layout, _, self.added = variant.partition("+")
        self.left, self.right, self.out = local_shapes(self.layout, shape)
        self.out_dtype = place.dtype
        if self.layout == "tn" and self.added:
            self.out_dtype = "float32"

    def without_addends(self) -> "_Build":
        return _Build(self.place, self.shape, self.layout)

    def specs(self):
        """Returns the shardings of both operands and of the result.

        Rows are sharded over the ranks. A wgrad sums over rows, so the columns of dy
        are sharded instead.
        """
        if self.layout == "tn":
            return [Spec(), Spec(None, AXIS)], Spec(None, AXIS)
        return [Spec(AXIS), Spec()], Spec(AXIS)

    def operands(self) -> list[jax.Array]:
        ranks = self.place.ranks
        scale = self.left[1 if self.layout != "tn" else 0] ** -0.5
        in_specs, out_spec = self.specs()
        arrays = [
            ranks.place(normal(0, self.left, self.place.dtype), in_specs[0]),
            ranks.place(normal(1, self.right, self.place.dtype, scale), in_specs[1]),
        ]
        if self.added == "bias":
            bias = normal(2, self.out[1:], self.place.dtype)
            arrays.append(ranks.place(bias, Spec()))
        if self.added == "add":
            addend = normal(2, self.out, self.out_dtype)
            arrays.append(ranks.place(addend, out_spec))
        return arrays

    def candidate(self, name: str, function: Callable[..., Any], way: str = ""):
        """Returns a candidate that maps and jits `function(a, b, bias, addend)`."""
        in_specs, out_spec = self.specs()
        donated = (2,) if self.added == "add" else ()

        def program(a, b, *last):
            bias, addend = (
                (*last, None) if self.added == "bias" else (None, *last, None)[:2]
            )
            return function(a, b, bias, addend)

        if self.added:
            in_specs = [*in_specs, Spec() if self.added == "bias" else out_spec]
        return Candidate(
            name,
            self.place.ranks.program(program, in_specs, out_spec, donated),
            self.operands(),
            way=way,
            carry=2 if donated else None,
        )

    def best(self) -> Candidate:
        """Returns XLA's fastest program for this GEMM, over all variants of its dot."""
        candidates = []
        for way in dots.ways(self.layout, self.place.dtype, self.place.ranks.platform):
            program = functools.partial(self._xla, way)
            candidates.append(self.candidate(cases.BEST, program, str(way)))
        as_written = self.candidate(cases.BEST, self.naive(), cases.AS_WRITTEN)
        candidates.append(as_written)
        # The trials added their results to the donated addend, so draw new operands.
        return dataclasses.replace(fastest(candidates), operands=self.operands())

    def _xla(self, way, a, b, bias, addend):
        added = bias if addend is None else addend
        if added is None:
            return way(a, b, self.out_dtype)
        product = way(a, b, jnp.float32)
        return (added.astype(jnp.float32) + product).astype(self.out_dtype)

    def naive(self):
        def program(a, b, bias, addend):
            addends = [added for added in (bias, addend) if added is not None]
            return peers.naive_gemm(a, b, self.layout, *addends)

        return program


def _onednn(build, place):
    found = onednn.find(place.dtype, build.layout)
    if isinstance(found, str):
        return found
    arrays = [np.asarray(array) for array in build.operands()]
    a, b = arrays[:2]
    y = np.zeros(build.out, np.float32)
    if build.added:
        y[:] = arrays[2]

    def program():
        if build.added == "bias":
            y[:] = arrays[2]
        found(a, b, y, 1.0 if build.added else 0.0)
        return y

    return Candidate(cases.ONEDNN, program, [])
