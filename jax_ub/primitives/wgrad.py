"""The kernel's gradient, x^T dy, of operands that may lie with the peers."""

import dataclasses

import jax
import numpy as np

from jax_ub import reference
from jax_ub.primitives.call import Call

_GATHER = {None: 0, "x": 1, "dy": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgrad(Call):
    """Operands x, dy_i, then main_grad_i; results dw_i."""

    target = "jax_ub$wgrad"

    num_outputs: int
    accumulate: bool
    gather: str | None
    scale: float
    out_dtype: np.dtype

    def shapes(self, x, *others):
        """`[K, N_i]` each."""
        dys = others[: self.num_outputs]
        return [((x.shape[-1], dy.shape[-1]), self.out_dtype) for dy in dys]

    def communicated(self, x, *others):
        """All ranks' rows of the operand that lies with the peers."""
        away = (x,) if self.gather == "x" else others[: self.num_outputs]
        features = sum(operand.shape[-1] for operand in away)
        rows = away[0].shape[-2] * self.num_ranks
        return (*away[0].shape[:-2], rows, features)

    def reference(self, x, *others):
        """`main_grad_i + scale * x.T @ dy_i`, of the gathered operands."""
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
        """The rank's rows are all rows."""
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
        """As csrc/ffi binds them."""
        return {
            "num_outputs": self.num_outputs,
            "accumulate": self.accumulate,
            "gather": _GATHER[self.gather],
            "scale": np.float32(self.scale),
        }

    def aliases(self, operands):
        """Every result is written into its main_grad's buffer."""
        first = 1 + self.num_outputs
        return {
            first + i: i
            for i, main_grad in enumerate(operands[first:])
            if main_grad.dtype == self.out_dtype
        }

    @property
    def is_batchable(self):
        """A batch axis is summed over, so a mapped one cannot become one."""
        return False

    @property
    def gathers(self):
        """If it communicates at all."""
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
    """Sums `scale * x^T dy_i` over all rows, and adds it to `main_grad_i`.

    Args:
        x: activations, `[..., M, K]`; `[..., M/P, K]` if `gather` is "x".
        dys: gradients, `[..., M, N_i]`; `[..., M/P, N_i]` if `gather` is "dy".
        main_grads: accumulators, `[K, N_i]`, written in place; or None.
        gather: which operand's rows lie with the peers.
        scale: factor of the sum, before it is added.
        out_dtype: dtype of the results.
        **where: the fields of `Call`: on which ranks, by which method, under what name.

    Returns:
        `[K, N_i]` for every gradient.
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
