"""The primitive of a wgrad, x^T dy, which may all-gather x or dy first."""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call

_GATHER = {None: 0, "x": 1, "dy": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgrad(Call):
    """Computes kernel gradients, dw_i = main_grad_i + scale * x^T dy_i.

    Operands: x, all dy_i, then all main_grad_i if `accumulate`. If `gather` is "x" or
    "dy", each rank has only its rows of that operand, and the call all-gathers them.
    """

    target = "jax_ub$wgrad"

    num_outputs: int
    accumulate: bool
    gather: str | None
    scale: float
    out_dtype: np.dtype

    def shapes(self, x, *others):
        """Returns the shape `[K, N_i]` and the dtype of each kernel gradient dw_i."""
        dys = others[: self.num_outputs]
        return [((x.shape[-1], dy.shape[-1]), self.out_dtype) for dy in dys]

    def communicated(self, x, *others):
        """Returns the shape of the gathered operand, `[..., M, features]`.

        All dy_i count as one array.
        """
        away = (x,) if self.gather == "x" else others[: self.num_outputs]
        features = sum(operand.shape[-1] for operand in away)
        rows = away[0].shape[-2] * self.num_ranks
        return (*away[0].shape[:-2], rows, features)

    def reference(self, x, *others):
        """Computes each dw_i by `jax.lax.all_gather` and a plain dot product."""
        dys, main_grads = others[: self.num_outputs], others[self.num_outputs :]
        if self.gather == "x":
            x = reference.all_gather(x, self.axis_name)
        if self.gather == "dy":
            dys = tuple(reference.all_gather(dy, self.axis_name) for dy in dys)
        dws = (reference.scaled(reference.outer(x, dy), self.scale) for dy in dys)
        return [
            reference.add(dw, main_grad, out_dtype=self.out_dtype)
            for dw, main_grad in zip(dws, main_grads or [None] * len(dys), strict=True)
        ]

    def on_one_rank(self, *operands):
        """Computes the dw_i without a gather, because a single rank has all rows."""
        call = Wgrad(
            num_outputs=self.num_outputs,
            accumulate=self.accumulate,
            gather=None,
            scale=self.scale,
            out_dtype=self.out_dtype,
            **self.local,
        )
        return call(*operands)

    def options(self):
        """Returns the FFI attributes of this target, which csrc/ffi decodes."""
        return {
            "num_outputs": self.num_outputs,
            "accumulate": self.accumulate,
            "gather": _GATHER[self.gather],
            "scale": np.float32(self.scale),
        }

    def aliases(self, operands):
        """Lets dw_i overwrite main_grad_i, if both have the same dtype."""
        first = 1 + self.num_outputs
        return {
            first + i: i
            for i, main_grad in enumerate(operands[first:])
            if main_grad.dtype == self.out_dtype
        }

    @property
    def is_batchable(self):
        """Returns False, because dw_i is summed over batch axes and so has none."""
        return False

    @property
    def gathers(self):
        """Returns True, because the only collective of a wgrad is an all-gather."""
        return True


def wgrad(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    main_grads: tuple[jax.Array, ...] | None,
    *,
    gather: str | None = None,
    scale: float = 1.0,
    out_dtype,
    **where,
) -> tuple[jax.Array, ...]:
    """Computes kernel gradients `scale * x^T dy_i`, and adds them to `main_grad_i`.

    Args:
        x: activations, `[..., M, K]`; `[..., M/P, K]` if `gather` is "x".
        dys: gradients, `[..., M, N_i]`; `[..., M/P, N_i]` if `gather` is "dy".
        main_grads: accumulators, `[K, N_i]`, overwritten by the results; or None.
        gather: the operand to all-gather, "x" or "dy"; None gathers nothing.
        scale: factor of the products, applied before main_grad is added.
        out_dtype: dtype of the results.
        **where: the fields of `Call`, such as ranks, method and label.

    Returns:
        The kernels' gradients, `[K, N_i]` each.
    """
    call = Wgrad(
        num_outputs=len(dys),
        accumulate=main_grads is not None,
        gather=gather,
        scale=float(scale),
        out_dtype=np.dtype(out_dtype),
        **where,
    )
    return call(x, *dys, *(main_grads or ()))
