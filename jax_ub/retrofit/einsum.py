"""An `einsum_op` for `flax.nnx.Einsum` that overlaps its contraction."""

import dataclasses
import re
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ub.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub.retrofit import interception
from jax_ub.retrofit.dot_general import DotGeneral


@dataclasses.dataclass(frozen=True)
class Equation:
    """The einsum of x and a kernel, by the labels of their dimensions.

    It is a dense layer's where each label is in two of x, kernel and y. Transposed, x
    is then `[*lead, *ins]`, the kernel `[*ins, *outs]` and y `[*lead, *outs]`:

    | equation | lead | ins | outs |
    |---|---|---|---|
    | "BTD,NDH->BTNH" | BT | D | NH |
    | "BTD,SNDH->SBTNH" | BT | D | NHS |
    | "BTNH,NHD->BTD" | BT | NH | D |

    The first of the ins, or of the outs, is what tensor parallelism shards. What stands
    in front of y stacks several results (S: query, key and value), and comes last.
    """

    x: str
    kernel: str
    y: str

    @classmethod
    def read(cls, text: str, x_ndim: int | None = None) -> "Equation":
        """Reads "x,kernel->y"; "..." is all of x [x_ndim] that has no label."""
        text = text.replace(" ", "")
        unused = "".join(sorted(set(string.ascii_letters) - set(text)))
        named = len(text.split(",")[0].replace("...", ""))
        labels = unused[: max((x_ndim or 0) - named, 0)]
        return cls(*re.split(",|->", text.replace("...", labels)))

    @property
    def is_dense(self) -> bool:
        """Whether a dense layer multiplies so."""
        terms = (self.x, self.kernel, self.y)
        labels = "".join(terms)
        is_each_twice = all(labels.count(label) == 2 for label in labels)
        is_none_twice = all(len(set(term)) == len(term) for term in terms)
        return is_each_twice and is_none_twice and bool(self.ins and self.outs)

    @property
    def lead(self) -> str:
        """Those of x alone."""
        return "".join(label for label in self.x if label in self.y)

    @property
    def ins(self) -> str:
        """Those that are contracted."""
        return "".join(label for label in self.x if label in self.kernel)

    @property
    def outs(self) -> str:
        """Those of the kernel alone."""
        own = "".join(label for label in self.y if label in self.kernel)
        num_stacked = len(self.y) - len(self.y.lstrip(own))
        return own[num_stacked:] + own[:num_stacked]


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`jax.numpy.einsum` of x and a kernel, as the dense layer that it is.

    Attributes:
        dense: what multiplies.
        sharded: the label of the kernel's dimension that is sharded; "" is the first.
        original: the function that the layer called before; None looks up
            `jax.numpy.einsum` at the call.
    """

    dense: DotGeneral
    sharded: str = ""
    original: Callable | None = None

    @property
    def kind(self) -> str:
        """Which dimensions of the kernel are sharded: "column" or "row"."""
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
    ) -> jax.Array:
        """Multiplies as `jax.numpy.einsum` does; sums are in f32 at any precision.

        Raises:
            UnsupportedOverlapError: if the equation, which a call may bring, is no
                dense layer's, and JAX must not multiply: a method was named, or the
                arrays are one rank's shards.
            ShapeContractError: if x or kernel has other dimensions than the equation.
        """
        reason = self.dense.why_intercepted(interception.EINSUM, self.original)
        equation = None if reason else Equation.read(subscripts, x.ndim)
        if equation is not None and not equation.is_dense:
            reason = f"{shown(subscripts)} is no dense layer's"
            self._check_may_fall_back(reason)
        if equation is None or reason is not None:
            options: dict[str, Any] = {"precision": precision}
            if preferred_element_type is not None:
                options["preferred_element_type"] = preferred_element_type
            if out_sharding is not None:
                options["out_sharding"] = out_sharding
            einsum = jnp.einsum if self.original is None else self.original
            with self.dense.falling_back(str(reason)):
                return einsum(subscripts, x, kernel, **options)
        if (len(equation.x), len(equation.kernel)) != (x.ndim, kernel.ndim):
            raise ShapeContractError(
                f"{self.dense.sharding_layout.op}: x {x.shape} and kernel "
                f"{kernel.shape} "
                f"have other numbers of dimensions than in {shown(subscripts)}. Pass "
                "one for each label."
            )
        ins, outs = (
            self._sharded_first(equation.ins),
            self._sharded_first(equation.outs),
        )
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
        )
        return _transpose(y, y_labels, equation.y)

    def _check_may_fall_back(self, reason):
        sharding_layout = self.dense.sharding_layout
        if not sharding_layout.may_fall_back() or sharding_layout.is_local():
            raise UnsupportedOverlapError(
                f"{sharding_layout.op}: {reason}. Call the layer with each label in "
                f"two of "
                "x, kernel and result, or leave it alone in the rules of ub.overlap."
            )

    def _sharded_first(self, labels):
        return "".join(sorted(labels, key=lambda label: label != self.sharded))


def _transpose(array, labels, wanted):
    return jnp.transpose(array, [labels.index(label) for label in wanted])


def _transpose_sharding(sharding: Any, labels, wanted) -> Any:
    """Transposes a layout, a `NamedSharding` or `PartitionSpec` or None."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = dict(zip(labels, spec, strict=False))  # a layout may be shorter
    spec = P(*(entries.get(label) for label in wanted))
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else spec
