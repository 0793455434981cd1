"""The public functions in plain `jax.lax`, which JAX differentiates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax


def vary(x, axes):
    """Casts a value to vary over `axes`, too, if its type has varying axes."""
    new = frozenset(axes) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(new)), to="varying") if new else x


@jax.custom_vjp
def _into(w, main_grad):
    return w


_into.defvjp(lambda w, mg: (w, mg), lambda mg, dw: (jnp.zeros_like(dw), mg + dw))


@dataclasses.dataclass(frozen=True)
class Plain:
    """The public functions as plain jax.lax; JAX differentiates them itself."""

    is_vma_checked: bool

    def _over(self, axis_name, x):
        axes = (axis_name,) if isinstance(axis_name, str) else axis_name
        return vary(x, axes) if self.is_vma_checked else x

    @staticmethod
    def _dot(x, w, main_grad, rhs_transposed=False):
        w = w.astype(jnp.float32)
        if main_grad is not None:
            w = _into(
                vary(w, jax.typeof(main_grad).manual_axis_type.varying), main_grad
            )
        return x.astype(jnp.float32) @ (w.T if rhs_transposed else w)

    @staticmethod
    def _sum(dtype, y, *addends):
        for addend in addends:
            y = y if addend is None else y + addend.astype(jnp.float32)
        return y.astype(dtype)

    def all_gather_matmul(  # noqa: PLR0913, as the public one
        self,
        x,
        w,
        *,
        axis_name,
        bias=None,
        method=None,
        return_gathered=False,
        out_dtype=None,
        main_grad=None,
        rhs_transposed=False,
    ):
        if not isinstance(w, tuple):
            bias, main_grad = (v if v is None else (v,) for v in (bias, main_grad))
        ws = w if isinstance(w, tuple) else (w,)
        none = (None,) * len(ws)
        gathered = lax.all_gather(
            self._over(axis_name, x), axis_name, axis=x.ndim - 2, tiled=True
        )
        ys = tuple(
            self._sum(
                out_dtype or x.dtype, self._dot(gathered, w, mg, rhs_transposed), b
            )
            for w, b, mg in zip(ws, bias or none, main_grad or none, strict=True)
        )
        y = ys if isinstance(w, tuple) else ys[0]
        return (y, gathered) if return_gathered else y

    def matmul_reduce_scatter(self, x, w, **given):
        axis = {"scatter_dimension": x.ndim - 2, "tiled": True}
        return self._summed(functools.partial(lax.psum_scatter, **axis), x, w, **given)

    def matmul_all_reduce(self, x, w, **given):
        return self._summed(lax.psum, x, w, **given)

    def _summed(  # noqa: PLR0913, what the public ones take
        self,
        collective,
        x,
        w,
        *,
        axis_name,
        bias=None,
        residual=None,
        method=None,
        out_dtype=None,
        main_grad=None,
        rhs_transposed=False,
    ):
        product = self._dot(x, w, main_grad, rhs_transposed)
        partial = self._over(axis_name, product)
        y = collective(partial, axis_name)
        return self._sum(out_dtype or x.dtype, y, bias, residual)

    def all_reduce(self, x, *, axis_name, bias=None, residual=None):
        partial = self._over(axis_name, x).astype(jnp.float32)
        return self._sum(x.dtype, lax.psum(partial, axis_name), bias, residual)

    def dgrad_add(self, dy, w, residual):
        return self._sum(residual.dtype, self._dot(dy, w, None, True), residual)

    def wgrad_accumulate(self, x, dy, main_grad):
        x, dy = (v.reshape(-1, v.shape[-1]).astype(jnp.float32) for v in (x, dy))
        return self._sum(main_grad.dtype, x.T @ dy, main_grad)

    def linear(  # noqa: PLR0913, as the public one
        self,
        x,
        w,
        b=None,
        *,
        parallel=None,
        axis_name=None,
        sequence_parallel=True,
        method=None,
        main_grad=None,
        rhs_transposed=False,
    ):
        given = {"axis_name": axis_name, "bias": b, "main_grad": main_grad}
        if parallel == "row":
            scatters = sequence_parallel
            op = self.matmul_reduce_scatter if scatters else self.matmul_all_reduce
            return op(x, w, rhs_transposed=rhs_transposed, **given)
        if parallel == "column" and sequence_parallel:
            return self.all_gather_matmul(x, w, rhs_transposed=rhs_transposed, **given)
        y = self._sum(x.dtype, self._dot(x, w, main_grad, rhs_transposed), b)
        return self._over(axis_name, y) if parallel else y
