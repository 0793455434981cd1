"""A `dot_general` for Flax's layers that overlaps their contraction."""

import dataclasses

import jax
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_ub import methods
from jax_ub.errors import UnsupportedOverlapError, shown
from jax_ub.retrofit.placement import Placement, resolve_kind
from jax_ub.retrofit.sharded_linear import (
    as_matrix,
    lay_out,
    sharded_linear,
    split_features,
    why_uneven,
)
from jax_ub.shapes import FLOATS, has_symbolic_sizes


def dot_general(
    kind: str,
    *,
    axis_name: str = "tp",
    mesh: Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
    ub_name: str | None = None,
    fsdp_axes: tuple[str, ...] | str = (),
) -> "DotGeneral":
    """Makes a `dot_general=` for `nn.Dense`, `nnx.Linear` and their like.

        nn.Dense(features, dot_general=ub.dot_general("column"))

    It multiplies global arrays x `[..., tokens, K]` and kernel `[K, N]`, which it lays
    out on the mesh, or a rank's own inside `jax.shard_map`. Transformer Engine: none.

    Args:
        kind: "column" (the kernel's out dimensions are sharded; the tokens of x are
            gathered) or "row" (its in dimensions; the result is summed and scattered).
            "ag" and "rs" mean the same.
        axis_name: the tensor-parallel mesh axis.
        mesh: the mesh; None takes that of `jax.set_mesh` or of the arrays.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers;
            otherwise a column layer gathers nothing and a row layer all-reduces.
        data_axes: the mesh axes over the leading axis of x; None takes all the others.
        ub_name: the layer's name: in errors, and in `initialize_ub`.
        fsdp_axes: the mesh axes that shard the kernel's other dimension (FSDP); the
            types of an explicit mesh show them by themselves. Inside `jax.shard_map`
            the kernel is gathered over them by the caller.

    Returns:
        A hashable callable with the signature of `jax.lax.dot_general`.

    Raises:
        UnknownNameError: if there is no such kind or method.
        ShapeContractError: if `mesh` is none.
    """
    return DotGeneral(
        Placement(
            resolve_kind("dot_general", kind),
            axis_name,
            mesh,
            data_axes,
            sequence_parallel,
            method,
            ub_name,
            fsdp_axes,
        )
    )


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` with the contraction of a dense layer overlapped.

    Overlapped are contractions of the last dimensions of x with the first of the
    kernel. On global arrays anything else is `jax.lax.dot_general`'s, and so are calls
    whose tokens do not divide into the ranks, or whose sizes are symbolic, unless a
    method was named: a model may be initialized with one token. `ub.fallbacks` lists
    them.
    """

    placement: Placement

    @property
    def kind(self) -> str:
        """Which dimensions of the kernel are sharded: "column" or "row"."""
        return str(self.placement.parallel)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ) -> jax.Array:
        """Multiplies as `jax.lax.dot_general` does; sums are in f32 at any precision.

        Raises:
            UnsupportedOverlapError: for one rank's shards that are not contracted as a
                dense layer's: they would miss their communication.
        """
        num_in = _dense_rank(lhs, rhs, dimension_numbers)
        reason = self._why_not(lhs, rhs, num_in)
        if reason is None:
            y = self._overlap(lhs, rhs, num_in, preferred_element_type)
            return lay_out(y, out_sharding)
        if out_sharding is None and num_in is not None and self.kind == "row":
            out_sharding = _whole_features(lhs, num_in, rhs.ndim - num_in)
        with methods.falling_back(self.placement.op, reason):
            return lax.dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
            )

    def _why_not(self, lhs, rhs, num_in):
        """Says why `jax.lax` has to multiply, None if it has not."""
        placement = self.placement
        reason = None
        if num_in is None:
            reason = (
                f"x {lhs.shape} and kernel {rhs.shape} are not contracted over the "
                "last dimensions of x and the first of the kernel"
            )
        elif lhs.dtype != rhs.dtype or lhs.dtype not in FLOATS:
            reason = f"x is {lhs.dtype} and the kernel is {rhs.dtype}"
        elif lhs.size == 0:
            reason = f"x {lhs.shape} is empty"
        if placement.is_local():
            if reason is None:
                return None
            raise UnsupportedOverlapError(
                f"{placement.op}: {reason}, and inside shard_map over "
                f"{shown(placement.axis_name)} nothing else would communicate. Use "
                "jax.lax.dot_general and communicate yourself, or call it on global "
                "arrays."
            )
        mesh = placement.find_mesh(rhs, lhs)
        may_fall_back = placement.may_fall_back() and not has_symbolic_sizes(lhs)
        if reason is None and mesh is not None and may_fall_back:
            placement.axis_size(mesh)
            tokens = lhs.shape[: lhs.ndim - num_in] or (1,)
            return why_uneven(placement, mesh, (*tokens, lhs.shape[-1]))
        return reason

    def _overlap(self, lhs, rhs, num_in, out_dtype):
        self.placement.check_contraction(lhs, rhs, num_in)
        self.placement.check_kernel_spec(jax.typeof(rhs).sharding.spec, num_in)
        outs = rhs.shape[num_in:]
        kernel = as_matrix(rhs, num_in)
        x = lhs.reshape(*lhs.shape[: lhs.ndim - num_in], kernel.shape[0])
        y = sharded_linear(self.placement, x, kernel, out_dtype=out_dtype)
        return split_features(y, outs)


def _whole_features(lhs, num_in, num_out):
    """Returns a row layer's layout where explicit axes ask for it: tokens as in x."""
    sharding = jax.typeof(lhs).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    lead = sharding.spec[: lhs.ndim - num_in]
    return sharding.update(spec=P(*lead, *[None] * num_out))


def _dense_rank(lhs, rhs, dimension_numbers):
    """Returns how many dimensions a dense layer contracts, None if it is not one."""
    (lhs_contract, rhs_contract), batch = dimension_numbers
    num_in = len(rhs_contract)
    is_dense = (
        not any(map(len, batch))
        and 0 < num_in < rhs.ndim
        and tuple(rhs_contract) == tuple(range(num_in))
        and tuple(lhs_contract) == tuple(range(lhs.ndim - num_in, lhs.ndim))
    )
    return num_in if is_dense else None
