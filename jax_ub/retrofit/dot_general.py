"""A `dot_general` for Flax's layers that overlaps their contraction."""

import dataclasses
import math

import jax
from jax import lax
from jax.sharding import AxisType

from jax_ub import methods
from jax_ub.errors import UnsupportedOverlapError
from jax_ub.methods import Method
from jax_ub.retrofit import placement as placed
from jax_ub.retrofit.placement import Placement
from jax_ub.runtime import settings
from jax_ub.shapes import FLOATS


def dot_general(
    kind: str,
    *,
    axis_name: str = "tp",
    mesh: jax.sharding.Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
    ub_name: str | None = None,
) -> "DotGeneral":
    """Makes a `dot_general=` for `nn.Dense`, `nnx.Linear` and their like.

        nn.Dense(features, dot_general=ub.dot_general("column"))

    Args:
        kind: "column" (the kernel's out dimensions are sharded; the tokens of x are
            gathered) or "row" (its in dimensions; the result is summed and scattered).
            "ag" and "rs" mean the same.
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between the
            layers; otherwise a column layer gathers nothing and a row layer all-reduces.
        data_axes: the mesh axes over the leading axis of x; None takes all the others.
        ub_name: the layer's name in error texts.

    Returns:
        A hashable callable with the signature of `jax.lax.dot_general`.

    Raises:
        UnknownNameError: if there is no such kind or method.
    """
    kind = placed.resolve_kind("dot_general", kind)
    methods.resolve("dot_general", method, None)
    axes = None if data_axes is None else tuple(data_axes)
    placement = Placement(kind, axis_name, mesh, axes, sequence_parallel)
    return DotGeneral(placement, method, ub_name)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` with the contraction of a dense layer overlapped.

    Overlapped are contractions of the last dimensions of x with the first of the
    kernel. Others, and on global arrays also calls whose tokens do not divide into the
    ranks (a model's first call with one token), are `jax.lax.dot_general`'s.
    """

    placement: Placement
    method: str | None = None
    ub_name: str | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        **kwargs,
    ) -> jax.Array:
        """Multiplies as `jax.lax.dot_general` does.

        Sums are made in f32 whatever `precision` says.
        """
        num_in = _dense_rank(lhs, rhs, dimension_numbers)
        reason = self._why_not(lhs, rhs, num_in)
        if reason is None:
            y = self._overlap(lhs, rhs, num_in, preferred_element_type)
            return _constrain(y, kwargs.get("out_sharding"))
        self._record(reason)
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            **kwargs,
        )

    def _why_not(self, lhs, rhs, num_in):
        """Says why `jax.lax` has to multiply, None if the engine can."""
        op, placement = f"dot_general({self.placement.parallel!r})", self.placement
        reason = None
        if num_in is None:
            reason = (
                f"x {lhs.shape} and kernel {rhs.shape} are not contracted over the "
                "last dimensions of x and the first of the kernel"
            )
        elif lhs.dtype != rhs.dtype or lhs.dtype not in FLOATS:
            reason = f"x is {lhs.dtype} and the kernel is {rhs.dtype}"
        if placement.is_local():
            if reason is None:
                return None
            # On one rank's shards plain jax.lax would leave out the communication.
            raise UnsupportedOverlapError(
                f"{op}: {reason}, and inside shard_map over {placement.axis_name!r} "
                "nothing else would communicate. Call it on global arrays, or write "
                "this layer with jax.lax."
            )
        mesh = placement.find_mesh(rhs, lhs)
        if reason is None and mesh is not None and self._may_fall_back():
            placement.axis_size(mesh)
            tokens = lhs.shape[: lhs.ndim - num_in] or (1,)
            return placed.why_uneven(placement, mesh, (*tokens, lhs.shape[-1]))
        return reason

    def _may_fall_back(self):
        chosen = methods.resolve("dot_general", self.method, settings.method())
        return chosen is Method.AUTO

    def _record(self, reason):
        name = "" if self.ub_name is None else f" (ub_name {self.ub_name!r})"
        label = f"dot_general({self.placement.parallel!r}){name}"
        methods.record_fallback(label, reason)

    def _overlap(self, lhs, rhs, num_in, out_dtype):
        self.placement.check_kernel_spec(jax.typeof(rhs).sharding.spec, num_in)
        features = math.prod(rhs.shape[:num_in])
        outs = rhs.shape[num_in:]
        x = lhs.reshape(*lhs.shape[: lhs.ndim - num_in], features)
        kernel = rhs.reshape(features, math.prod(outs))
        y = placed.run(
            self.placement,
            x,
            kernel,
            method=self.method,
            ub_name=self.ub_name,
            out_dtype=out_dtype,
        )
        return y.reshape(*y.shape[:-1], *outs)


def _dense_rank(lhs, rhs, dimension_numbers) -> int | None:
    """Returns how many dimensions a dense layer contracts, None if it is not one."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    num_in = len(rhs_contract)
    is_dense = (
        not len(lhs_batch)
        and not len(rhs_batch)
        and 0 < num_in < rhs.ndim
        and tuple(rhs_contract) == tuple(range(num_in))
        and tuple(lhs_contract) == tuple(range(lhs.ndim - num_in, lhs.ndim))
    )
    return num_in if is_dense else None


def _constrain(y, sharding):
    """Lays the result out as the caller of `dot_general(out_sharding=)` asks."""
    if sharding is None:
        return y
    types = jax.typeof(y).sharding.mesh.axis_types
    if AxisType.Explicit in types:
        return jax.sharding.reshard(y, sharding)
    return lax.with_sharding_constraint(y, sharding)
