"""An `einsum_op` for `flax.nnx.Einsum` that overlaps GEMM and communication."""

import dataclasses
import re
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.retrofit.dot_general import DotGeneral
from jax_ub._src.retrofit.selection import EINSUM


@dataclasses.dataclass(frozen=True)
class Equation:
    """An einsum equation "x,kernel->y", parsed to one label (letter) per dimension.

    The einsum is a dense layer if each label occurs in exactly two of x, kernel and y.
    Then x can be transposed to `[*lead, *ins]`, the kernel to `[*ins, *outs]` and y to
    `[*lead, *outs]`:

    | equation | lead | ins | outs |
    |---|---|---|---|
    | "BTD,NDH->BTNH" | BT | D | NH |
    | "BTD,SNDH->SBTNH" | BT | D | NHS |
    | "BTNH,NHD->BTD" | BT | NH | D |

    Tensor parallelism shards the first label of ins or of outs. Kernel labels at the
    front of y stack several results, such as S for query, key and value. They are moved
    to the end of outs, so that they are not sharded.
    """

    x: str
    kernel: str
    y: str

    @classmethod
    def read(cls, text: str, x_ndim: int | None = None) -> "Equation":
        """Parses an einsum equation "x,kernel->y".

        Replaces "..." by new labels for the dimensions of x, of `x_ndim`, without one.
        An equation with "..." in the kernel keeps it, so that it is not dense.
        """
        terms = re.split(",|->", text.replace(" ", ""))
        if "..." in terms[1]:
            return cls(*terms)
        unused = "".join(sorted(set(string.ascii_letters) - set(text)))
        named = len(terms[0].replace("...", ""))
        labels = unused[: max((x_ndim or 0) - named, 0)]
        return cls(*(term.replace("...", labels) for term in terms))

    @property
    def is_dense(self) -> bool:
        """Returns whether the einsum computes a dense layer, `x @ kernel`."""
        terms = (self.x, self.kernel, self.y)
        labels = "".join(terms)
        is_each_twice = all(labels.count(label) == 2 for label in labels)
        is_none_twice = all(len(set(term)) == len(term) for term in terms)
        return is_each_twice and is_none_twice and bool(self.ins and self.outs)

    @property
    def lead(self) -> str:
        """Returns the labels of batch and token dimensions, which x and y share."""
        return "".join(label for label in self.x if label in self.y)

    @property
    def ins(self) -> str:
        """Returns the labels of contracted dimensions, which x and kernel share."""
        return "".join(label for label in self.x if label in self.kernel)

    @property
    def outs(self) -> str:
        """Returns the labels of the output features, which kernel and y share.

        Labels of stacked results come last.
        """
        own = "".join(label for label in self.y if label in self.kernel)
        num_stacked = len(self.y) - len(self.y.lstrip(own))
        return own[num_stacked:] + own[:num_stacked]


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Replaces `jax.numpy.einsum` in dense layers, overlapping GEMM and collective.

    Attributes:
        dense: the function that computes the product of a dense layer.
        sharded: the label of the kernel's sharded dimension; "" takes the first one.
        original: the function that the layer called before; None looks up
            `jax.numpy.einsum` at each call.
    """

    dense: DotGeneral
    sharded: str = ""
    original: Callable | None = None

    @property
    def kind(self) -> str:
        """Returns "column" if the kernel's outputs are sharded, else "row"."""
        return self.dense.kind

    def __call__(
        self,
        subscripts: str,
        x: jax.Array,
        kernel: jax.Array,
        *,
        precision=None,
        preferred_element_type=None,
        out_sharding=None,
        fp8_state: Any = None,
    ) -> jax.Array:
        """Computes an einsum, overlapped if it is the product of a dense layer.

        Sums are f32 whatever `precision` is. `fp8_state` is that of `DotGeneral`.

        Raises:
            UnsupportedOverlapError: if `subscripts` is not the contraction of a dense
                layer, but the call must not fall back to JAX: a method is given, or the
                arrays are one rank's shards.
            ShapeContractError: if the number of dimensions of x or kernel differs from
                the number of labels in `subscripts`.
        """
        reason = self.why_not(subscripts, x.ndim)
        if reason is not None:
            options: dict[str, Any] = {"precision": precision}
            if preferred_element_type is not None:
                options["preferred_element_type"] = preferred_element_type
            if out_sharding is not None:
                options["out_sharding"] = out_sharding
            einsum = jnp.einsum if self.original is None else self.original
            with self.dense.falling_back(reason):
                return einsum(subscripts, x, kernel, **options)
        equation = Equation.read(subscripts, x.ndim)
        if (len(equation.x), len(equation.kernel)) != (x.ndim, kernel.ndim):
            raise ShapeContractError(
                f"{self.dense.sharding_layout.op}: x {x.shape} and kernel "
                f"{kernel.shape} do not have the dimensions of {shown(subscripts)}. "
                "Pass one dimension for each label."
            )
        ins, outs = map(self._sharded_first, (equation.ins, equation.outs))
        num_lead, num_in = len(equation.lead), len(ins)
        contracted = (range(num_lead, x.ndim), range(num_in))
        y_labels = equation.lead + outs
        y = self.dense(
            _transpose(x, equation.x, equation.lead + ins),
            _transpose(kernel, equation.kernel, ins + outs),
            (contracted, ((), ())),
            precision,
            preferred_element_type,
            out_sharding=_transpose_sharding(out_sharding, equation.y, y_labels),
            fp8_state=fp8_state,
        )
        return _transpose(y, y_labels, equation.y)

    def why_not(self, subscripts: str, x_ndim: int) -> str | None:
        """Returns why JAX must compute the einsum, or None if it can be overlapped."""
        reason = self.dense.why_intercepted(EINSUM, self.original)
        if reason is None and not Equation.read(subscripts, x_ndim).is_dense:
            reason = f"{shown(subscripts)} is not a dense layer"
            self.dense.check_may_fall_back(
                reason,
                "Call the layer with each label in two of x, kernel and result, or "
                "exclude it in the rules of the overlap.",
            )
        return reason

    def _sharded_first(self, labels):
        return "".join(sorted(labels, key=lambda label: label != self.sharded))


def _transpose(array, labels, wanted):
    return jnp.transpose(array, [labels.index(label) for label in wanted])


def _transpose_sharding(sharding: Any, labels, wanted) -> Any:
    """Permutes the dimensions of a sharding or partition spec, as in a transpose.

    `labels` has a letter for each dimension; `wanted` has the letters in the new order.
    None stays None.
    """
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = dict(zip(labels, spec, strict=False))  # spec may be shorter than labels
    spec = P(*(entries.get(label) for label in wanted))
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else spec
