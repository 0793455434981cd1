"""Overlap for an unmodified linen model, as a Flax interceptor."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from jax import lax
from jax.sharding import Mesh

from jax_ub.errors import UnsupportedOverlapError, shown
from jax_ub.retrofit.dot_general import DotGeneral, dot_general
from jax_ub.retrofit.overlap import compile_rule
from jax_ub.retrofit.placement import resolve_kind
from jax_ub.runtime.overlaps import LayerPath


class Overlap:
    r"""Overlaps the `nn.Dense` and `nn.DenseGeneral` layers of an unmodified model.

        overlap = Overlap({r".*\.(query|key|value)": "column", r".*\.out": "row"})
        with nn.intercept_methods(overlap):
            logits = model.apply(variables, tokens)

    While the model is traced in the block, the layers that a rule names multiply with
    `ub.dot_general`; modules and parameters are left as they are. What `jax.jit` traced
    outside of the block is not traced again in it. The nnx twin is `ub.overlap`.

    Args:
        rules: regular expressions that match whole paths of layers, such as
            "decoder.layer_0.Dense_0", to "column", "row" or None (leave it alone). The
            first that matches counts.
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
        data_axes: the mesh axes over the leading axis of x; None takes all the others.
        fsdp_axes: the mesh axes that shard the kernels' other dimension (FSDP); the
            types of an explicit mesh show them by themselves.

    Attributes:
        overlapped: "column" or "row" by path, of the layers that it met so far: a rule
            that is missing here matched none.

    Raises:
        UnknownNameError: if a rule is no regular expression or names no kind, or there
            is no such method.
        ShapeContractError: if `mesh` is none, or `data_axes` or `fsdp_axes` are no
            names of other axes, each once.
    """

    overlapped: dict[str, str]

    def __init__(
        self,
        rules: Mapping[str, str | None],
        *,
        axis_name: str = "tp",
        mesh: Mesh | None = None,
        method: str | None = None,
        sequence_parallel: bool = True,
        data_axes: tuple[str, ...] | None = None,
        fsdp_axes: tuple[str, ...] | str = (),
    ):
        """Reads the rules."""
        self._rules = [
            (
                compile_rule(rule),
                None if kind is None else resolve_kind("overlap", kind),
            )
            for rule, kind in rules.items()
        ]
        self._options: dict[str, Any] = {
            "axis_name": axis_name,
            "mesh": mesh,
            "method": method,
            "sequence_parallel": sequence_parallel,
            "data_axes": data_axes,
            "fsdp_axes": fsdp_axes,
        }
        dot_general("column", **self._options)  # refuses what it cannot take
        self.overlapped = {}

    def __call__(
        self, next_fun: Callable, args: tuple, kwargs: dict, context: Any
    ) -> Any:
        """Calls a method of a module, as Flax asks of an interceptor.

        Raises:
            UnsupportedOverlapError: if a rule names a layer with a `dot_general` of its
                own.
        """
        layer, path = context.module, ".".join(context.module.path)
        kind = self._kind(path) if _is_dense(layer, context.method_name) else None
        if kind is None:
            return next_fun(*args, **kwargs)
        before = layer.dot_general
        own = before if layer.dot_general_cls is None else layer.dot_general_cls
        if own not in (None, lax.dot_general) and not isinstance(own, DotGeneral):
            raise UnsupportedOverlapError(
                f"overlap: the layer {shown(path)} has a dot_general of its own, "
                f"{own}. Leave the layer alone: {{{shown(path)}: None, ...}}."
            )
        self.overlapped[path] = kind
        ours = dot_general(kind, ub_name=LayerPath(path), **self._options)
        # Bound modules are frozen, and may be called again outside of the block.
        object.__setattr__(layer, "dot_general", ours)
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(layer, "dot_general", before)

    def _kind(self, path):
        matching = (kind for rule, kind in self._rules if rule.fullmatch(path))
        return next(matching, None)


def _is_dense(layer, method_name) -> bool:
    if method_name != "__call__":
        return False
    is_general = isinstance(layer, nn.DenseGeneral) and not layer.batch_dims
    return is_general or isinstance(layer, nn.Dense)
