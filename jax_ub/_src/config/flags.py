"""The `ub_*` flags of a layer, as in Transformer Engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ub._src.checks import check_flag
from jax_ub._src.errors import ConfigurationError, UnsupportedOverlapError
from jax_ub._src.methods import Method
from jax_ub._src.parallel import PARALLEL, PASSES, ParallelMode, mode_of

# The methods that overlap a GEMM with the collective of its operand or result. Method
# "bulk", in contrast, overlaps a GEMM with an independent collective.
FUSED = frozenset((Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE))
# Maps each flag to what it controls, for error messages.
_MEANING = {
    "ub_overlap_ag": "the all-gather of a GEMM's operand",
    "ub_overlap_rs": "the reduce-scatter of a row layer's result",
    "ub_overlap_rs_dgrad": "the reduce-scatter of a column layer's dgrad",
    "ub_bulk_dgrad": "the all-gather during a column layer's dgrad GEMM",
    "ub_bulk_wgrad": "the reduce-scatter during a column layer's wgrad GEMM",
}
_BULK = ("ub_bulk_dgrad", "ub_bulk_wgrad")


@dataclasses.dataclass(frozen=True)
class OverlapFlags:
    """A layer's `ub_*` flags, which select the collectives that overlap with GEMMs.

    True overlaps the communication or raises an error, False runs it as plain
    `jax.lax`, and None lets jax_ub choose. A flag for communication that a layer does
    not have is ignored, so that all layers of a model can take the same flags.

    Attributes:
        ub_overlap_ag: the all-gather of a column-parallel layer's input in the forward
            pass, and of a row-parallel layer's output gradient in dgrad.
        ub_overlap_rs: the reduce-scatter of a row-parallel layer's result in the
            forward pass.
        ub_overlap_rs_dgrad: the reduce-scatter of a column-parallel layer's input
            gradient, overlapped with the dgrad GEMM that computes it.
        ub_bulk_dgrad: the all-gather of a column-parallel layer's input, concurrent
            with the dgrad GEMM.
        ub_bulk_wgrad: the reduce-scatter of a column-parallel layer's input gradient,
            concurrent with the wgrad GEMM. It must equal `ub_bulk_dgrad`.
    """

    ub_overlap_ag: bool | None = None
    ub_overlap_rs: bool | None = None
    ub_overlap_rs_dgrad: bool | None = None
    ub_bulk_dgrad: bool | None = None
    ub_bulk_wgrad: bool | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "OverlapFlags":
        """Returns the `ub_*` flags among a layer's keyword arguments."""
        return cls(**{name: options.get(name) for name in NAMES})

    @property
    def is_bulk(self) -> bool | None:
        """Returns the value that both `ub_bulk_*` flags must have, or None if unset."""
        return self.ub_bulk_dgrad if self.ub_bulk_wgrad is None else self.ub_bulk_wgrad

    @property
    def given(self) -> dict[str, bool]:
        """Returns the `ub_*` flags that the user has set: {name: bool}."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: bool(value) for name, value in named.items() if value is not None}

    def check(
        self,
        op: str,
        method: Method,
        *,
        parallel: str | None = "both",
        sequence_parallel: bool = True,
    ) -> None:
        """Raises an error if flags contradict each other or a layer's arguments.

        Args:
            op: the layer, for errors.
            method: the layer's argument `method`; `AUTO` if it has none.
            parallel: "column", "row", None, or "both" for a module with layers of both.
            sequence_parallel: whether tokens are sharded between layers.
        """
        for name in NAMES:
            if getattr(self, name) is not None:
                check_flag(op, name, getattr(self, name))
        self._check_backward(op)
        self._check_layer(op, parallel, sequence_parallel)
        relevant = flags_of(mode_of(parallel, True)) if parallel in PARALLEL else NAMES
        for name in relevant:
            self.check_method(op, name, method, f'method = "{method.value}"')

    def check_method(self, op: str, name: str, method: Method, source: str) -> None:
        """Raises an error if a flag contradicts a method that the user has chosen.

        Args:
            op: the layer, for errors.
            name: the flag's name.
            method: the method; `AUTO` agrees with every flag.
            source: where the method was given, for errors.
        """
        flag = self.given.get(name)
        if flag is None or method is Method.AUTO:
            return
        overlaps = method is Method.BULK if name in _BULK else method in FUSED
        if flag != overlaps:
            does = "overlaps" if overlaps else "does not overlap"
            raise ConfigurationError(
                f"{op}: {name} = {flag}, but {source} {does} {_MEANING[name]}. Leave "
                "one of the two out."
            )

    def _check_backward(self, op):
        flags = self.given
        bulk = [name for name in _BULK if flags.get(name)]
        if flags.get("ub_overlap_rs_dgrad") and bulk:
            raise ConfigurationError(
                f"{op}: ub_overlap_rs_dgrad = True and {bulk[0]} = True, but an input "
                "gradient is reduce-scattered once: during the dgrad GEMM or the wgrad "
                "GEMM. Leave one of the two out."
            )
        if len({flags[name] for name in _BULK if name in flags}) > 1:
            raise UnsupportedOverlapError(
                f"{op}: ub_bulk_dgrad = {self.ub_bulk_dgrad} and ub_bulk_wgrad = "
                f"{self.ub_bulk_wgrad}, but jax_ub overlaps both or neither. Pass "
                "equal values."
            )

    def _check_layer(self, op, parallel, sequence_parallel):
        wanted = [name for name, flag in self.given.items() if flag]
        if not wanted:
            return
        if parallel is None:
            raise UnsupportedOverlapError(
                f"{op}: {wanted[0]} = True, but a layer with parallel = None does not "
                'communicate. Pass parallel="column" or "row", or leave the flag out.'
            )
        if not sequence_parallel:
            raise UnsupportedOverlapError(
                f"{op}: {wanted[0]} = True, but with sequence_parallel = False nothing "
                "is gathered or scattered. Pass sequence_parallel=True, or leave the "
                "flag out."
            )


NAMES = tuple(field.name for field in dataclasses.fields(OverlapFlags))


def flags_of(mode: ParallelMode, passes: Sequence[str] = PASSES) -> tuple[str, ...]:
    """Returns the names of the `ub_*` flags that affect `passes` of a parallel mode.

    For example, "ub_overlap_ag" affects the forward pass of a column-parallel layer.
    """
    found = (each.flag for name in passes for each in mode.communications(name))
    return tuple(dict.fromkeys(filter(None, found)))
