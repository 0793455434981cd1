"""A `dot_general` for Flax layers that overlaps GEMM and communication."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub._src import arguments, dtypes, lowering_log
from jax_ub._src.checks import check_array, has_symbolic_sizes
from jax_ub._src.errors import (
    ShapeContractError,
    UbError,
    UnknownNameError,
    UnsupportedOverlapError,
    shown,
)
from jax_ub._src.fp8.recipes import Recipe, check_layer_recipe
from jax_ub._src.parallel import COLUMN
from jax_ub._src.retrofit.selection import DOT_GENERAL, Product, why_intercepted
from jax_ub._src.scalars import is_integer
from jax_ub._src.sharding.layout import (
    ShardingLayout,
    parallel_of_spec,
    resolve_parallel,
)
from jax_ub._src.sharding.matrices import as_matrix, merge_features, split_features
from jax_ub._src.sharding.sharded_linear import sharded_linear, with_output_sharding
from jax_ub._src.sharding.specs import indivisible_reason, mapped_reason, spec_over

_NO_MESH = (
    "no mesh is known here: call the layer under jax.set_mesh(mesh), or pass mesh= to "
    "the overlap"
)


@arguments.keywords_checked
def dot_general(  # noqa: PLR0913, options of a layer
    kind: str,
    *,
    axis_name: str | tuple[str, ...] = "tp",
    mesh: Mesh | None = None,
    method: str | None = None,
    sequence_parallel: bool = True,
    data_axes: tuple[str, ...] | None = None,
    ub_name: str | None = None,
    fsdp_axes: tuple[str, ...] | str = (),
    fp8: Recipe | None = None,
) -> "DotGeneral":
    """Makes a `dot_general` that overlaps communication, for layers like `nn.Dense`.

        nn.Dense(features, dot_general=ub.dot_general("column"))

    The returned function multiplies global arrays x `[..., tokens, K]` and kernel
    `[K, N]`, and shards them over the mesh by itself. Inside `jax.shard_map`, it
    multiplies one rank's shards. A kernel `[N, K]`, contracted over its last
    dimensions, is read in place. If a library such as Qwix intercepts
    `jax.lax.dot_general`, JAX computes the product without overlap, and `ub.fallbacks`
    lists the call. Transformer Engine: none.

    Args:
        kind: "column" (the kernel's out dimensions are sharded; the tokens of x are
            all-gathered) or "row" (its in dimensions are sharded; the result is
            reduce-scattered). "ag" and "rs" are aliases.
        axis_name: the tensor-parallel mesh axis, or a tuple of axes that act as one.
        mesh: the mesh; None takes the mesh of `jax.set_mesh` or of the arrays.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        sequence_parallel: whether tokens are sharded over `axis_name` between layers.
            Otherwise a column layer does not gather and a row layer all-reduces.
        data_axes: the mesh axes that shard the leading axis of x; None takes all axes
            except `axis_name`.
        ub_name: the layer's name in errors and in the configuration of `initialize_ub`.
        fsdp_axes: the mesh axes that shard the kernel's other dimension (FSDP). With an
            explicit mesh they are read from the kernel's type. Inside `jax.shard_map`
            the caller gathers the kernel over them.
        fp8: an FP8 recipe, by which the layer quantizes its operands. The state of
            `DelayedScaling` is the argument `fp8_state` of a call. The products that
            JAX computes are not FP8.

    Returns:
        A hashable callable with the signature of `jax.lax.dot_general`.

    Raises:
        UnknownNameError: if there is no such kind or method, or if `sequence_parallel`
            is not a bool.
        ShapeContractError: if `mesh` is not a mesh, or if `data_axes` or `fsdp_axes`
            are not distinct names of other axes than `axis_name`.
        ConfigurationError: if `fp8` is not a recipe.
    """
    check_layer_recipe("dot_general", fp8)
    return DotGeneral(
        ShardingLayout(
            resolve_parallel("dot_general", "kind", kind),
            axis_name,
            mesh,
            data_axes,
            sequence_parallel,
            method,
            ub_name,
            fsdp_axes,
            fp8=fp8,
        )
    )


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The contraction of x [*lead, *in] with a kernel [*in, *out] or [*out, *in].

    Attributes:
        kernel: the kernel.
        num_in: the number of contracted dimensions.
        rhs_transposed: whether the kernel is [*out, *in].
    """

    kernel: jax.Array
    num_in: int
    rhs_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the kernel's shape in the order [*in, *out]."""
        return self._in_out(self.kernel.shape)

    @property
    def spec(self) -> tuple:
        """Returns the kernel's partition spec in the order [*in, *out]."""
        return self._in_out(jax.typeof(self.kernel).sharding.spec)

    @property
    def features(self) -> tuple[int, int]:
        """Returns the sizes of the kernel's first input and first output dimension."""
        return self.shape[0], self.shape[self.num_in]

    def _in_out(self, dims):
        if not self.rhs_transposed:
            return tuple(dims)
        return (*dims[-self.num_in :], *dims[: -self.num_in])


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """Replaces `jax.lax.dot_general` in dense layers, overlapping GEMM and collective.

    A dense layer contracts the last dimensions of x with the first or the last
    dimensions of the kernel. On global arrays, `jax.lax.dot_general` computes all other
    contractions. Without a method, it also computes calls whose tokens do not divide by
    the number of ranks, such as the initialization of a model with one token, or whose
    sizes are symbolic. `ub.fallbacks` lists these calls.

    Attributes:
        sharding_layout: the sharding layout of the layer.
        original: the function that the layer called before; None looks up
            `jax.lax.dot_general` at each call.
        kernel_size: the number of elements of the global kernel; None if unknown.
        is_lenient: whether the layer runs by JAX on a mesh on which it cannot be
            overlapped; otherwise it raises an error.
    """

    sharding_layout: ShardingLayout
    original: Callable | None = None
    kernel_size: int | None = None
    is_lenient: bool = False

    @property
    def kind(self) -> str:
        """Returns "column" if the kernel's output features are sharded, else "row"."""
        return str(self.sharding_layout.parallel)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
        fp8_state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Computes `jax.lax.dot_general`, overlapped if the operands allow it.

        Sums are f32 whatever `precision` is. `fp8_state` is the state of the recipe,
        from `ub.fp8.init_state`; its gradient is its new value.

        Raises:
            UnsupportedOverlapError: if the operands are one rank's shards and the
                contraction is not a dense layer's, since nothing would communicate. Or
                if a library intercepts `jax.lax.dot_general` and a method is given.
        """
        reason = self.why_intercepted(DOT_GENERAL, self.original)
        contraction = None
        if reason is None:
            op = self.sharding_layout.op
            _check_call(op, lhs, rhs, dimension_numbers)
            arguments.check_precision(op, "precision", precision)
            contraction = _contraction_of(lhs, rhs, dimension_numbers)
            reason = self._why_not(lhs, rhs, contraction, preferred_element_type)
        if reason is None and contraction is not None:
            layout, x, kernel = self._operands(lhs, contraction)
            (y,) = sharded_linear(
                layout,
                x,
                (kernel,),
                fp8_states=(fp8_state,),
                out_dtype=preferred_element_type,
            )
            y = split_features(y, contraction.shape[contraction.num_in :])
            return with_output_sharding(y, out_sharding)
        if out_sharding is None and contraction is not None and self.kind == "row":
            out_sharding = _whole_features(lhs, contraction)
        if contraction is not None and self._needs_all_tokens(contraction):
            # The overlapped layer gathers the tokens of x, so the fallback must gather
            # them, too.
            lhs = _whole_tokens(lhs, self.sharding_layout)
        product = lax.dot_general if self.original is None else self.original
        with self.falling_back(str(reason)):
            return product(
                lhs,
                rhs,
                dimension_numbers,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
            )

    def why_intercepted(
        self, product: Product, original: Callable | None
    ) -> str | None:
        """Returns how another library has patched JAX's product function, or None.

        The layer then calls the patched function `product` instead of overlapping.
        Raises an error if the layer must not fall back to JAX.
        """
        reason = why_intercepted(product, original)
        if reason is not None:
            fix = "Leave out the method, so that JAX multiplies, or do not overlap"
            self.check_may_fall_back(reason, f"{fix} this layer.")
        return reason

    def check_may_fall_back(self, reason: str, fix: str) -> None:
        """Raises an error unless plain JAX may compute the product without overlap.

        Plain JAX must not if a method is given, or if the arrays are one rank's shards.
        """
        if not self.sharding_layout.may_fall_back():
            raise UnsupportedOverlapError(f"{self.sharding_layout.op}: {reason}. {fix}")
        if self.sharding_layout.is_local() and not self._is_whole_in_shard_map():
            raise self._no_communication(reason)

    def falling_back(self, reason: str) -> AbstractContextManager[None]:
        """Returns a context manager that records this layer in `ub.fallbacks`."""
        return lowering_log.falling_back(self.sharding_layout.op, reason)

    def _no_communication(self, reason):
        return UnsupportedOverlapError(
            f"{self.sharding_layout.op}: {reason}, and inside shard_map over "
            f"{shown(self.sharding_layout.axis_name)} nothing else would communicate. "
            "Use jax.lax.dot_general with explicit collectives, or call it on global "
            "arrays."
        )

    def _why_not(self, lhs, rhs, contraction, out_dtype):
        """Returns why JAX must compute the product without overlap, or None."""
        layout = self.sharding_layout
        reason = _why_not_dense(lhs, rhs, contraction, out_dtype)
        if layout.is_local():
            if self.is_lenient and self._is_whole_in_shard_map(contraction):
                self._warn_of_missing_axes(jax.sharding.get_abstract_mesh())
                return "the kernel is whole inside this jax.shard_map"
            if reason is None:
                return None
            raise self._no_communication(reason)
        may_fall_back = layout.may_fall_back() and not has_symbolic_sizes(lhs)
        if reason is not None or not may_fall_back:
            return reason
        mesh = layout.find_mesh(rhs, lhs)
        if mesh is None:
            return _NO_MESH if self.is_lenient else None
        if self.is_lenient:
            self._warn_of_missing_axes(mesh)
        try:
            fitted = self._layout(mesh, contraction)
            fitted.axis_size(mesh)
            if self.is_lenient:
                fitted.check_features(contraction.features, mesh)
                fitted.check_kernel_spec(contraction.spec, contraction.num_in)
            tokens = lhs.shape[: lhs.ndim - contraction.num_in] or (1,)
            reason = indivisible_reason(layout, mesh, (*tokens, lhs.shape[-1]))
            return mapped_reason(mesh) if reason is None else reason
        except UbError as error:
            if not self.is_lenient:
                raise
            return str(error).removeprefix(f"{layout.op}: ")

    def _warn_of_missing_axes(self, mesh):
        """Warns, once per process, about mesh axes of the layer that the mesh lacks."""
        layout = self.sharding_layout
        try:
            layout.check_axes(mesh)
        except UnknownNameError as error:
            kind = f"axes {layout.axes} {layout.data_axes} of {mesh.axis_names}"
            text = f"{error} JAX runs the layer without overlap."
            lowering_log.warn_once(kind, text, "docs/retrofit.md")

    def _is_whole_in_shard_map(self, contraction=None):
        """Returns whether each rank of a `shard_map` has the unsharded kernel."""
        mesh, axes = jax.sharding.get_abstract_mesh(), self.sharding_layout.axes
        if set(axes).isdisjoint(mesh.shape):
            return True
        is_one = math.prod(mesh.shape.get(name, 1) for name in axes) == 1
        if contraction is None or is_one:
            return False
        return contraction.kernel.size == self.kernel_size

    def _needs_all_tokens(self, contraction):
        """Returns whether the fallback must gather a column-parallel layer's tokens.

        A kernel with several output dimensions computes attention heads, and each rank
        needs all tokens for attention. JAX rejects a product of tokens and features
        that are sharded over the same axis.
        """
        axis_name, num_in = self.sharding_layout.axis_name, contraction.num_in
        has_heads = contraction.kernel.ndim - num_in > 1
        return has_heads or parallel_of_spec(contraction.spec, num_in, axis_name)

    def _layout(self, mesh, contraction):
        """Returns the layer's sharding layout, adapted to this kernel and mesh.

        `fsdp_axes` that cannot shard the kernel evenly are removed if the layer is
        lenient. Manual axes are removed, because the caller has gathered the kernel.
        """
        layout = self.sharding_layout
        manual = jax.sharding.get_abstract_mesh().manual_axes
        layout = dataclasses.replace(
            layout,
            rhs_transposed=contraction.rhs_transposed,
            fsdp_axes=tuple(name for name in layout.fsdp_axes if name not in manual),
        )
        if not self.is_lenient or mesh is None:
            return layout
        return layout.fitted(mesh, contraction.features)

    def _operands(self, lhs, contraction):
        """Returns the sharding layout, x as [*lead, K], and the kernel as [K, N]."""
        kernel, num_in = contraction.kernel, contraction.num_in
        mesh = self.sharding_layout.global_mesh(kernel, lhs)
        layout = self._layout(mesh, contraction)
        layout.check_contraction(lhs, contraction.shape, num_in)
        layout.check_kernel_spec(contraction.spec, num_in)
        explicit = () if mesh is None else mesh.explicit_axes
        if self.kind == COLUMN and not set(explicit).isdisjoint(layout.axes):
            # On an explicit mesh, the type of the result has a sharded first output
            # dimension, so the number of ranks must divide this dimension.
            unsharded = dataclasses.replace(layout, fsdp_axes=())
            unsharded.check_features(contraction.features, mesh)
        num_rows = kernel.ndim - num_in if contraction.rhs_transposed else num_in
        kernel = as_matrix(kernel, num_rows)
        return layout, merge_features(lhs, num_in), kernel


def _why_not_dense(lhs, rhs, contraction, out_dtype):
    if contraction is None:
        return (
            f"x {lhs.shape} and kernel {rhs.shape} are not contracted over the "
            "last dimensions of x and the first or the last of the kernel"
        )
    if lhs.dtype != rhs.dtype or lhs.dtype not in dtypes.OPERANDS:
        return (
            f"x is {lhs.dtype} and the kernel is {rhs.dtype}, but both must have one "
            f"dtype: {dtypes.listed(dtypes.OPERANDS)}"
        )
    if out_dtype is not None and jnp.dtype(out_dtype) not in dtypes.RESULTS:
        return f"the result would have the dtype {jnp.dtype(out_dtype)}"
    return f"x {lhs.shape} is empty" if lhs.size == 0 else None


def _whole_features(lhs, contraction):
    """Returns the sharding of a row-parallel layer's result, or None.

    The leading dimensions are sharded as in x, and the features are replicated. The
    result is None if the mesh has no explicit axes, which need an output sharding.
    """
    sharding = jax.typeof(lhs).sharding
    if not sharding.mesh.explicit_axes:
        return None
    lead = sharding.spec[: lhs.ndim - contraction.num_in]
    num_out = contraction.kernel.ndim - contraction.num_in
    return sharding.update(spec=P(*lead, *[None] * num_out))


def _whole_tokens(lhs, layout):
    """Gathers the tokens of a column-parallel layer's x if the mesh axes are explicit.

    With automatic axes XLA gathers them where the model needs them.
    """
    sharding = jax.typeof(lhs).sharding
    axes = set(layout.axes)
    if layout.parallel != COLUMN or axes.isdisjoint(sharding.mesh.explicit_axes):
        return lhs
    spec = spec_over(sharding.spec, set(sharding.mesh.axis_names) - axes)
    return jax.sharding.reshard(lhs, sharding.update(spec=spec))


def _check_call(op, lhs, rhs, dimension_numbers):
    """Raises an error for arguments that `jax.lax.dot_general` does not accept."""
    check_array(op, "x", lhs)
    check_array(op, "kernel", rhs)
    try:
        (lhs_contract, rhs_contract), batch = dimension_numbers
        is_call = len(lhs_contract) == len(rhs_contract) and len(batch) == 2
        is_call = is_call and len(batch[0]) == len(batch[1])
        dims = [*lhs_contract, *rhs_contract, *batch[0], *batch[1]]
        is_call = is_call and all(map(is_integer, dims))
    except Exception:  # iterating over an arbitrary object may raise anything
        is_call = False
    if not is_call:
        raise ShapeContractError(
            f"{op}: dimension_numbers = {shown(dimension_numbers)} are not those of "
            "jax.lax.dot_general. Pass ((x_contract, kernel_contract), (x_batch, "
            "kernel_batch)), each a tuple of dimensions."
        )


def _contraction_of(lhs, rhs, dimension_numbers) -> Contraction | None:
    """Returns the `Contraction` if a dense layer computes this dot, otherwise None.

    A dense layer contracts the last dimensions of x with the first or the last
    dimensions of the kernel. The order of the pairs of dimensions is arbitrary.
    """
    (lhs_contract, rhs_contract), batch = dimension_numbers
    pairs = sorted(zip(lhs_contract, rhs_contract, strict=True))
    num_in = len(pairs)
    if any(map(len, batch)) or not 0 < num_in < rhs.ndim:
        return None
    x_dims, kernel_dims = zip(*pairs, strict=True)
    if x_dims != tuple(range(lhs.ndim - num_in, lhs.ndim)):
        return None
    if kernel_dims == tuple(range(num_in)):
        return Contraction(rhs, num_in, rhs_transposed=False)
    if kernel_dims == tuple(range(rhs.ndim - num_in, rhs.ndim)):
        return Contraction(rhs, num_in, rhs_transposed=True)
    return None
