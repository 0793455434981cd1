"""Builds the cases of local GEMMs, `ub.dgrad_add` and `ub.wgrad_accumulate`."""

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
from jax_ub._src.tools.devices import AXIS, Spec, normal
from jax_ub._src.tools.options import Shape
from jax_ub._src.tools.timing import Candidate, fastest

VARIANTS = ("nn", "nn+bias", "nn+add", "nt", "nt+bias", "nt+add", "tn", "tn+add")
# A function that computes the GEMM of (a, b, bias or None, addend or None).
Gemm = Callable[..., jax.Array]


def own_gemm(choice: MethodChoice, layout: str, out_dtype: str | None = None) -> Gemm:
    """Returns jax_ub's local GEMM for a layout "nn", "nt" or "tn" of `bench.peers`.

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
    """Returns a benchmark case for each variant, such as "nn+bias", of a local GEMM.

    The GEMM runs on one device, so the list is empty if there are several ranks.
    """
    if setup.num_ranks > 1:
        return []
    variants = setup.variants or VARIANTS
    return [_Gemm(setup, shape, variant).case("gemm") for variant in variants]


def dgrad_add(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark case of `ub.dgrad_add`, `residual + dy w^T` in place.

    The rows of `dy` and `residual` are sharded.
    """
    own = lambda dy, w, _, residual: ub.dgrad_add(dy, w, residual)  # noqa: E731
    return [_Gemm(setup, shape, "nt+add").case("dgrad_add", own)]


def wgrad_accumulate(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the benchmark case of `ub.wgrad_accumulate`, in place.

    It computes `main_grad + x^T dy`. The columns of `dy` and `main_grad` are sharded.
    """
    own = lambda x, dy, _, main_grad: ub.wgrad_accumulate(x, dy, main_grad)  # noqa: E731
    return [_Gemm(setup, shape, "tn+add").case("wgrad_accumulate", own)]


class _Gemm:
    """Builds the candidates of a GEMM benchmark, with an optional bias or addend.

    Jitted programs take (a, b), (a, b, bias) or (a, b, addend). An addend is donated:
    the result replaces it.
    """

    def __init__(self, setup: Setup, shape: Shape, variant: str):
        self.setup, self.shape, self.variant = setup, shape, variant
        self.layout, _, self.added = variant.partition("+")
        left, right, out = map(shape.sizes, peers.LAYOUTS[self.layout])
        self.left, self.right, self.out = left, right, out
        is_f32 = self.layout == "tn" and self.added
        self.out_dtype = "float32" if is_f32 else setup.dtype
        # Rows are sharded over the ranks. A wgrad sums over rows, so the columns of dy
        # are sharded instead.
        self.in_specs, self.out_spec = [Spec(AXIS), Spec()], Spec(AXIS)
        if self.layout == "tn":
            self.in_specs, self.out_spec = [Spec(), Spec(None, AXIS)], Spec(None, AXIS)
        if self.added:
            self.in_specs.append(Spec() if self.added == "bias" else self.out_spec)

    def case(self, op: str, public: Gemm | None = None) -> Case:
        # The public functions have no argument `method`. For other methods than "auto",
        # the program is built from the primitives that they call.
        setup, layout = self.setup, self.layout
        own = public if setup.method == "auto" else None
        choice = MethodChoice(Method(setup.method))
        candidates = [
            self.candidate(cases.OWN, own or own_gemm(choice, layout)),
            self.best(),
            self.candidate(cases.NAIVE, self.naive),
            cases.copy_limit(self.shape.bytes(setup.dtype)),
        ]
        notes: tuple[str, ...] = ()
        if setup.ranks.platform == "cpu":
            onednn = self.onednn()
            if isinstance(onednn, str):
                notes = (onednn,)
            elif op == "gemm":
                candidates.append(onednn)
        if op != "gemm":
            plain = own_gemm(choice, layout, self.out_dtype)
            without = _Gemm(setup, self.shape, layout)
            candidates.append(without.candidate(cases.PLAIN, plain))
        return setup.case(op, self.shape, candidates, variant=self.variant, notes=notes)

    def operands(self) -> list[jax.Array]:
        dtype = self.setup.dtype
        scale = self.left[1 if self.layout != "tn" else 0] ** -0.5
        arrays = [normal(0, self.left, dtype), normal(1, self.right, dtype, scale)]
        if self.added == "bias":
            arrays.append(normal(2, self.out[1:], dtype))
        if self.added == "add":
            arrays.append(normal(2, self.out, self.out_dtype))
        return list(map(self.setup.ranks.place, arrays, self.in_specs))

    def candidate(self, name: str, function: Gemm, variant: str = "") -> Candidate:
        """Returns a candidate that runs `function(a, b, bias, addend)` on all ranks."""
        carry = 2 if self.added == "add" else None

        def program(a, b, added=None):
            return function(a, b, *((None, added) if carry else (added, None)))

        donated = (carry,) if carry else ()
        jitted = self.setup.ranks.program(
            program, self.in_specs, self.out_spec, donated
        )
        return Candidate(name, jitted, self.operands(), variant, carry)

    def best(self) -> Candidate:
        """Returns XLA's fastest program for this GEMM, timing all dot variants."""

        def xla(dot):
            def program(a, b, bias, addend):
                added = bias if addend is None else addend
                if added is None:
                    return dot(a, b, self.out_dtype)
                product = dot(a, b, jnp.float32)
                return (added.astype(jnp.float32) + product).astype(self.out_dtype)

            return program

        platform = self.setup.ranks.platform
        variants = [
            self.candidate(cases.BEST, xla(dot), str(dot))
            for dot in peers.dot_variants(self.layout, self.setup.dtype, platform)
        ]
        variants.append(self.candidate(cases.BEST, self.naive, peers.NAIVE_VARIANT))
        # New operands are drawn, because the trials added their results to the donated
        # addend.
        return dataclasses.replace(fastest(variants), operands=self.operands())

    def naive(self, a, b, bias, addend):
        y = peers.naive_dot(a, b, self.layout)
        added = bias if addend is None else addend
        if added is None:
            return y
        return added + y.astype(jnp.promote_types(added.dtype, y.dtype))

    def onednn(self) -> Candidate | str:
        found = peers.find_onednn(self.setup.dtype, self.layout)
        if isinstance(found, str):
            return found
        a, b, *added = (np.asarray(array) for array in self.operands())
        y = np.zeros(self.out, np.float32)
        if added:
            y[:] = added[0]

        def program():
            if self.added == "bias":
                y[:] = added[0]
            found(a, b, y, 1.0 if added else 0.0)
            return y

        return Candidate(cases.ONEDNN, program, [])
