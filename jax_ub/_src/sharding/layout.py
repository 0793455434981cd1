"""`ShardingLayout`: how the arrays of a linear layer are sharded over a mesh."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ub._src import arguments, checks, methods
from jax_ub._src.checks import axis_tuple, check_axis_name
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.fp8.recipes import Recipe
from jax_ub._src.methods import Method
from jax_ub._src.parallel import COLUMN, IN_OUT, ROW, ParallelMode, mode_of
from jax_ub._src.rules.call_config import call_label
from jax_ub._src.runtime import settings

AnyMesh = Mesh | AbstractMesh

_KINDS = {COLUMN: COLUMN, ROW: ROW, "ag": COLUMN, "rs": ROW}


def resolve_parallel(op: str, name: str, kind: str | None) -> str:
    """Returns "column" or "row" for a parallel mode or its alias, "ag" or "rs".

    `name` is the name of the argument, for errors.
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnknownNameError(
            f"{op}: {name} = {shown(kind)} is not a way to shard a kernel. "
            f"{nearest(kind, _KINDS)}"
        )
    return _KINDS[kind]


def parallel_of_spec(
    spec: Sequence | None, num_in: int, axis_name: str | tuple[str, ...]
) -> str | None:
    """Returns the parallel mode of a kernel's partition spec: "column", "row" or None.

    The kernel is `[*in, *out]`. The result is "row" if an input dimension is sharded
    over all of `axis_name`, and "column" if an output dimension is. The result is None
    if no dimension is, or if the spec is None (unknown). `num_in` is the number of
    input dimensions.
    """
    dim = sharded_dim(spec, axis_name)
    if dim is None:
        return None
    return ROW if dim < num_in else COLUMN


def sharded_dim(spec: Sequence | None, axis_name: str | tuple[str, ...]) -> int | None:
    """Returns the first dimension sharded over all axes in `axis_name`, or None."""
    axes = set(axis_tuple(axis_name))
    for dim, entry in enumerate(spec or ()):
        if axes <= set(axis_tuple(entry)):
            return dim
    return None


@dataclasses.dataclass(frozen=True)
class _PortableMesh:
    """Picklable form of a `jax.sharding.Mesh`, with the ids of its devices."""

    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]
    shape: tuple[int, ...]
    platform: str
    device_ids: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "_PortableMesh":
        devices = tuple(mesh.devices.flat)
        ids = tuple(device.id for device in devices)
        platform = devices[0].platform if devices else ""
        shape = mesh.devices.shape
        return cls(mesh.axis_names, mesh.axis_types, shape, platform, ids)

    def find(self) -> Mesh | None:
        """Returns the `Mesh`, or None if this process lacks one of its devices."""
        known = {(device.platform, device.id): device for device in jax.devices()}
        devices = [known.get((self.platform, each)) for each in self.device_ids]
        if None in devices:
            return None
        table = np.array(devices, object).reshape(self.shape)
        return Mesh(table, self.axis_names, axis_types=self.axis_types)


class PickledMeshes:
    """Base class of objects that have a `Mesh` as attribute and can be pickled.

    The `Mesh` is pickled by the ids of its devices. After loading, the attribute is
    None if the process lacks one of the devices.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: _PortableMesh.of(value) if isinstance(value, Mesh) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            is_mesh = isinstance(value, _PortableMesh)
            vars(self)[name] = value.find() if is_mesh else value


@dataclasses.dataclass(frozen=True)
class ShardingLayout(PickledMeshes):
    """Hashable settings that say how a linear layer is sharded and executed.

    `jax_ub.flax.Linear` documents the fields that are its arguments, too. The others
    are:

    Attributes:
        flags: the `ub_*` flags of the layer.
        rhs_transposed: whether the kernel is stored as `[out, in]`.
        manual_fsdp_axes: the FSDP axes that are manual in the enclosing `shard_map`.
            They are not in `fsdp_axes`, and the kernel is a shard over them.
        kernel_mesh: the concrete mesh of the kernel when the layer was created. If the
            arrays of a call have an equal abstract mesh, it supplies the devices.
        replicated_op: for a layout that `replicated` returns, `op` of the layer's
            layout.
    """

    parallel: str | None
    axis_name: str | tuple[str, ...] = "tp"
    mesh: AnyMesh | None = None
    data_axes: tuple[str, ...] | str | None = None
    sequence_parallel: bool = True
    method: str | None = None
    ub_name: str | None = None
    fsdp_axes: tuple[str, ...] | str = ()
    flags: OverlapFlags = OverlapFlags()
    rhs_transposed: bool = False
    fp8: Recipe | None = None
    manual_fsdp_axes: tuple[str, ...] = ()
    kernel_mesh: Mesh | None = None
    replicated_op: str | None = None

    def __post_init__(self):
        """Checks the fields, and converts axis names to tuples or single strings."""
        arguments.check("linear", ub_name=self.ub_name)
        if self.parallel is not None:
            parallel = resolve_parallel(self.op, "parallel", self.parallel)
            object.__setattr__(self, "parallel", parallel)
        check_axis_name(self.op, self.axis_name)
        axis_name = self.axes[0] if len(self.axes) == 1 else self.axes
        object.__setattr__(self, "axis_name", axis_name)
        if self.data_axes is not None:
            data_axes = self._read_axes("data_axes", "dp", self.data_axes)
            object.__setattr__(self, "data_axes", data_axes)
        fsdp_axes = self._read_axes("fsdp_axes", "fsdp", self.fsdp_axes)
        object.__setattr__(self, "fsdp_axes", fsdp_axes)
        checks.check_flag(self.op, "sequence_parallel", self.sequence_parallel)
        is_mesh = isinstance(self.mesh, AnyMesh) and not self.mesh.empty
        if self.mesh is not None and not is_mesh:
            raise ShapeContractError(
                f"{self.op}: mesh = {shown(self.mesh)} is of type "
                f"{type(self.mesh).__name__}. Pass a jax.sharding.Mesh with axes, or "
                "None to use the mesh of jax.set_mesh or of the arrays."
            )
        self.flags.check(
            self.op,
            methods.resolve(self.op, self.method, None),
            parallel=self.parallel,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return axis_tuple(self.axis_name)

    def _read_axes(self, argument, example, given):
        names = axis_tuple(given)
        if not all(isinstance(name, str) for name in names):
            raise ShapeContractError(
                f"{self.op}: {argument} = {shown(given)} are not names of mesh "
                f'axes. Pass a tuple of them, for example {argument}=("{example}",).'
            )
        if not set(self.axes).isdisjoint(names):
            others = tuple(name for name in names if name not in self.axes)
            raise ShapeContractError(
                f"{self.op}: {argument} = {shown(names)} has axis_name = "
                f"{shown(self.axis_name)}, whose ranks share the tokens and features "
                f"of the same examples. Pass {argument}={others}, or another axis_name."
            )
        if len(set(names)) < len(names):
            raise ShapeContractError(
                f"{self.op}: {argument} = {shown(names)} names a mesh axis twice. "
                "Name each once."
            )
        return names

    @property
    def op(self) -> str:
        """Returns the layer's name in errors, such as `linear(parallel="column")`."""
        if self.replicated_op is not None:
            return self.replicated_op
        return call_label(f"linear(parallel={shown(self.parallel)})", self.ub_name)

    @property
    def mode(self) -> ParallelMode:
        return mode_of(self.parallel, self.sequence_parallel)

    @property
    def kernel_spec(self) -> P:
        """Returns the `PartitionSpec` of the stored kernel, [in, out] or [out, in]."""
        spec = self.mode.kernel_spec(self.axis_name, self.fsdp_axes)
        return P(*spec[::-1]) if self.rhs_transposed else spec

    @property
    def fsdp_dim(self) -> int:
        """Returns which dimension of the stored kernel FSDP shards: 0 or 1."""
        return self.in_out((0, 1))[self._fsdp_dim]

    @property
    def _fsdp_dim(self):
        """Returns which dimension of the kernel [in, out] FSDP shards: 0 or 1."""
        return self.mode.kernel.index(False)

    @property
    def bias_spec(self) -> P:
        return P(self.axis_name if self.mode.kernel[1] else None)

    def replicated(self) -> "ShardingLayout":
        """Returns a layout that shards nothing, for plain JAX on any mesh."""
        return dataclasses.replace(
            self,
            parallel=None,
            data_axes=None,
            fsdp_axes=(),
            method="xla",
            flags=OverlapFlags(),
            replicated_op=self.op,
        )

    def with_fsdp_of(
        self, spec: Sequence | None, mesh: AnyMesh | None, num_in: int
    ) -> "ShardingLayout":
        """Returns a copy with the FSDP axes in the partition spec of a kernel.

        The kernel is `[*in, *out]` with `num_in` in dimensions. The layout is returned
        unchanged if the spec or the mesh is unknown, or if the spec has names that are
        not other axes of the mesh, such as logical axis names.
        """
        dim = self._fsdp_dim * num_in
        entry = spec[dim] if spec is not None and dim < len(spec) else None
        names = entry if isinstance(entry, tuple) else (entry,)
        others = mesh is not None and set(names) <= {*mesh.shape} - {*self.axes}
        return dataclasses.replace(self, fsdp_axes=names) if others else self

    def may_fall_back(self) -> bool:
        """Returns whether the layer may run as plain JAX, without the engine.

        It may if no flag is True and the method is "auto" or "xla".
        """
        if any(self.flags.given.values()):
            return False
        chosen = methods.resolve(self.op, self.method, settings.method())
        return chosen in (Method.AUTO, Method.XLA)

    def is_local(self) -> bool:
        """Returns whether the layer runs on shards, inside a user's `shard_map`.

        This is the case if a tensor-parallel axis or all mesh axes are manual.
        """
        context = jax.sharding.get_abstract_mesh()
        manual = context.manual_axes
        has_manual = not set(self.axes).isdisjoint(manual)
        return has_manual or 0 < len(manual) == len(context.axis_names)

    def find_mesh(self, *arrays: Any) -> AnyMesh | None:
        """Returns the mesh over which a call's arrays are sharded, or None if unknown.

        It is the first of these that exists: the mesh of the enclosing `shard_map`, the
        field `mesh`, the mesh of `jax.set_mesh`, the first concrete mesh of the arrays,
        and their first abstract mesh. `kernel_mesh` replaces an equal abstract mesh.

        If the mesh of `jax.set_mesh` has the axes and sizes of the field `mesh`, it
        replaces the field: JAX requires its axis types, which `auto_axes` and
        `explicit_axes` change.
        """
        context = jax.sharding.get_abstract_mesh()
        is_same = self.mesh is None or self.mesh.shape_tuple == context.shape_tuple
        if context.manual_axes or (is_same and not context.empty):
            return context
        if self.mesh is not None:
            return self.mesh
        shardings = map(sharding_of, arrays)
        named = [each for each in shardings if isinstance(each, NamedSharding)]
        meshes = [each.mesh for each in named if not each.mesh.empty]
        if not meshes:
            return None
        concrete = (mesh for mesh in meshes if isinstance(mesh, Mesh))
        mesh = next(concrete, meshes[0])
        concrete_mesh = self.kernel_mesh
        if concrete_mesh is not None and mesh == concrete_mesh.abstract_mesh:
            return concrete_mesh
        return mesh

    def global_mesh(self, *arrays: Any) -> AnyMesh | None:
        """Returns the mesh of global arrays, or None inside a user's `shard_map`."""
        return None if self.is_local() else self.find_mesh(*arrays)

    def in_out(self, dims: Sequence) -> tuple:
        """Reorders `dims`, one item per kernel dimension, from stored to [in, out]."""
        if len(dims) != len(IN_OUT) or not self.rhs_transposed:
            return tuple(dims)
        return tuple(dims)[::-1]

    def fitted(self, mesh: AnyMesh, shape: Sequence[int]) -> "ShardingLayout":
        """Returns a copy without FSDP axes if these cannot shard the kernel evenly."""
        sizes = (mesh.shape.get(name, 0) for name in self.fsdp_axes)
        num_parts = math.prod(sizes)
        if num_parts and shape[self._fsdp_dim] % num_parts == 0:
            return self
        return dataclasses.replace(self, fsdp_axes=())

    def num_manual_fsdp(self) -> int:
        """Returns how many FSDP shards a kernel has in the enclosing `shard_map`."""
        mesh = jax.sharding.get_abstract_mesh()
        manual = set(mesh.manual_axes)
        return math.prod(mesh.shape[n] for n in self.fsdp_axes if n in manual)

    def check_axes(self, mesh: AnyMesh | None) -> None:
        """Raises an error if the mesh lacks an axis of `axis_name` or `data_axes`.

        The mesh is None if it is unknown.
        """
        if mesh is not None:
            self.axis_size(mesh)
            self.check_data_axes(mesh)

    def check_data_axes(self, mesh: AnyMesh) -> None:
        self._sizes(mesh, "data_axes has {}, which", self.data_axes or ())

    def axis_size(self, mesh: AnyMesh) -> int:
        """Returns the number of ranks on the tensor-parallel axis of `mesh`."""
        return math.prod(self._sizes(mesh, "axis_name = {}", self.axes))

    def _sizes(self, mesh, subject, names):
        """Returns the sizes of the mesh axes `names`, after checking that they exist.

        The error about a missing axis begins with `subject`, a format of its name.
        """
        for name in names:
            if name not in mesh.shape:
                raise UnknownNameError(
                    f"{self.op}: {subject.format(shown(name))} is not an axis of the "
                    f"mesh {dict(mesh.shape)}. {nearest(name, mesh.axis_names)}"
                )
        return [mesh.shape[name] for name in names]

    def check_features(self, shape: Sequence[int], mesh: AnyMesh) -> None:
        """Raises an error if a kernel's features do not divide into equal shards."""
        sizes = self._sizes(mesh, "fsdp_axes has {}, which", self.fsdp_axes)
        axes, fix = f"fsdp_axes = {self.fsdp_axes}", "fsdp_axes=() for this layer"
        self._check_divides(shape, self._fsdp_dim, math.prod(sizes), axes, fix)
        dim = self.mode.sharded_dim
        if dim is not None:
            axes, fix = f"mesh axis {shown(self.axis_name)}", "do not shard this layer"
            self._check_divides(shape, dim, self.axis_size(mesh), axes, fix)

    def _check_divides(self, shape, dim, num_ranks, axes, fix):
        if shape[dim] % num_ranks:
            padded = checks.round_up(shape[dim], num_ranks)
            raise ShapeContractError(
                f"{self.op}: the kernel has {shape[dim]} {IN_OUT[dim]} features, which "
                f"do not divide into the {num_ranks} ranks of {axes}. Use {padded}, or "
                f"{fix}."
            )

    def check_contraction(
        self, x: jax.Array, kernel_shape: Sequence[int], num_in: int = 1
    ) -> None:
        """Raises an error if x [..., *in] does not fit a kernel of shape [*in, *out].

        If they are one rank's shards and the numbers of features differ, nothing is
        raised here: the op raises an error that explains the required sharding.
        """
        found = x.shape[max(x.ndim - num_in, 0) :]
        wanted = tuple(kernel_shape[:num_in])
        is_local = self.is_local()
        if found == wanted or (is_local and math.prod(found) != math.prod(wanted)):
            return
        sizes = "one rank's sizes" if is_local else "global sizes"
        expected = ", ".join(map(str, wanted))
        raise ShapeContractError(
            f"{self.op}: x {x.shape} has features {list(found)}, but the kernel "
            f"{tuple(kernel_shape)} takes {list(wanted)}, in {sizes}. Pass x [..., "
            f"tokens, {expected}], or make the layer for {list(found)}."
        )

    def check_kernel_spec(self, spec: Sequence | None, num_in: int) -> None:
        """Raises an error if `axis_name` shards the wrong dimension of the kernel.

        A "column" parallel layer needs the output dimension, a "row" parallel layer the
        input dimension. `spec` is the partition spec of the kernel; None if unknown.
        """
        found = parallel_of_spec(spec, num_in, self.axis_name)
        if found is None or self.parallel is None or self.parallel == found:
            return
        dim, wanted = mode_of(found, True).sharded, self.mode.sharded
        raise ShapeContractError(
            f"{self.op}: the kernel is sharded {P(*spec or ())}, along its {dim} "
            f"dimension, but {shown(self.parallel)} needs its {wanted} dimension over "
            f"{shown(self.axis_name)}. Shard it {self._instead_of(spec)}, or use "
            f"{shown(found)}."
        )

    def _instead_of(self, spec):
        """Returns the partition spec that `check_kernel_spec` recommends for a kernel.

        Axes in `spec` besides `axis_name` move to the FSDP dimension.
        """
        names = dict.fromkeys(name for entry in spec for name in axis_tuple(entry))
        others = tuple(name for name in names if name not in self.axes)
        if not others:
            return str(self.kernel_spec)
        fixed = dataclasses.replace(self, fsdp_axes=others)
        return f"{fixed.kernel_spec}, as fsdp_axes={others} does"


def sharding_of(array: Any) -> Any:
    """Returns the sharding of an array or tracer, or None if it has no sharding."""
    if isinstance(array, jax.core.Tracer):
        return jax.typeof(array).sharding
    return getattr(array, "sharding", None)
