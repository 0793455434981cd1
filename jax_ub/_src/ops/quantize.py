"""`Quantize`, and how FP8 tensors and their quantizers pass between operations."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jax_ub._src import checks
from jax_ub._src.fp8.quantize import execution_over, quantize_arrays
from jax_ub._src.fp8.recipes import (
    INPUT,
    OUTPUT_GRAD,
    DelayedScaling,
    Float8CurrentScaling,
    Recipe,
    check_layer_recipe,
)
from jax_ub._src.fp8.state import NAMES, claim_state, init_state, names_of
from jax_ub._src.ops.basic import AllGather, Bias, ReduceScatter
from jax_ub._src.ops.fused_operation import Op, expand, windows
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.linear_gemms import state_in
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import mesh
from jax_ub._src.scaled_array import ScaledArray, is_scaled

_ROLES = (INPUT, OUTPUT_GRAD)  # of an activation and its gradient


class Quantizer(NamedTuple):
    """How to quantize a tensor: a recipe, and mesh axes whose ranks share the scale."""

    recipe: Recipe
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Quantize(BasicOperation):
    """An operation that quantizes an activation, or its gradient, to FP8.

    The next operation gets the quantized tensor, without a second cast, if it is a
    linear with a recipe, `fp8=`. `Identity`, `MakeExtraOutput` and `AllGather` pass the
    tensor on, and `AllGather` sends one byte per element. All other operations, the
    caller and extra outputs get the dequantized array, in the dtype of x. The gradient
    of y is passed on unchanged, as if nothing had been rounded.

    With `backward_quantized`, the operation before it gets the quantized gradient:
    `Bias`, `ReduceScatter` and `Identity` pass it on, and a linear with a recipe does
    not quantize it again.

    Without `fp8` and if there is such a linear, the recipe, the state and the axes of
    the scale are those of the linear.

    Transformer Engine: `te.ops.Quantize`; its operation fuser, which passes the
    quantizers of linears to their neighbors. Parameters: with
    `fp8=ub.fp8.DelayedScaling()` its state, by the names of `ub.fp8.init_state`;
    otherwise none. Residuals: the state.

    Attributes:
        forward_quantized: whether the activation is quantized.
        backward_quantized: whether the gradient is quantized.
        fp8: the recipe; None takes that of the linear, or
            `ub.fp8.Float8CurrentScaling()` if there is none.
        axis_name: mesh axes whose ranks share a scale per tensor, in addition to those
            of the linear.
    """

    overwritten = NAMES

    forward_quantized: bool = True
    backward_quantized: bool = False
    _: dataclasses.KW_ONLY
    fp8: Recipe | None = None
    axis_name: str | tuple[str, ...] | None = None
    # How the activation and its gradient are quantized; None if not quantized. This
    # depends on the linears and collectives before and after this operation, so
    # `with_quantizers` sets it in a copy.
    _quantizers: tuple[Quantizer | None, Quantizer | None] = dataclasses.field(
        default=(None, None), init=False, repr=False
    )

    takes_quantized = True
    takes_quantized_grad = True

    def __post_init__(self):
        super().__post_init__()
        check_layer_recipe(self.label, self.fp8)
        axes = checks.axis_tuple(self.axis_name)
        own = Quantizer(self.fp8 or Float8CurrentScaling(), axes)
        flags = (self.forward_quantized, self.backward_quantized)
        pair = tuple(own if flag else None for flag in flags)
        object.__setattr__(self, "_quantizers", pair)

    def init(self, key):
        state = {} if self.fp8 is None else init_state(self.fp8)
        return {name: state[name] for name in self.specs()}

    def specs(self):
        names = [name for role in _ROLES for name in self._state_names(role)]
        return dict.fromkeys(names, PartitionSpec())

    def _state_names(self, role):
        quantizer = self._quantizers[_ROLES.index(role)]
        has_state = quantizer and isinstance(quantizer.recipe, DelayedScaling)
        return names_of(role) if has_state else ()

    def linked(self, role: str, quantizer: Quantizer) -> "Quantize":
        """Returns a copy in which `quantizer` quantizes the tensor with this role."""
        pair = list(self._quantizers)
        pair[_ROLES.index(role)] = quantizer
        new = copy.copy(self)
        object.__setattr__(new, "_quantizers", tuple(pair))
        return new

    def claim(self, params):
        return {**params, **claim_state(self.label, state_in(params))}

    def saved(self, needs):
        return needs.params | frozenset(self._state_names(OUTPUT_GRAD))

    def forward(self, params, x, extra_inputs, saves):
        if not is_scaled(x):
            checks.check_float(self.label, x=x)
        if self.axis_name is not None:
            mesh.axis_size(self.label, self.axis_name, may_be_mapped=True)
        y, state = self._quantized(INPUT, x, state_in(params))
        return y, (), state

    def backward(self, residuals, dy, d_extra_outputs, needs):
        dx, state = self._quantized(OUTPUT_GRAD, dy, state_in(residuals))
        return dx, state, ()

    def _quantized(self, role, x, state):
        """Quantizes x unless it is FP8 already; returns x and the updated FP8 state."""
        quantizer = self._quantizers[_ROLES.index(role)]
        if quantizer is None or is_scaled(x):
            return x, state
        checks.check_not_empty(self.label, "x", x)
        execution = execution_over(self.label, quantizer.axes or None)
        (array,), new = quantize_arrays(execution, quantizer.recipe, role, (x,), state)
        quantized = ScaledArray(array.values, array.scales, jax.lax.stop_gradient(x))
        return quantized, {**state, **(new or {})}


_PassedState = tuple[int, int, str]  # linear, quantize, role: see `with_quantizers`


def _paths(ops: Sequence[BasicOperation], role: str) -> list[list[int]]:
    """Returns, per `Quantize`, the indices of the operations its FP8 tensor reaches.

    The first index of each list is that of the `Quantize`. With role `INPUT`, the
    tensors are activations, which pass forward through `ops`. With `OUTPUT_GRAD`, they
    are gradients, which pass backward. The last operation may be a linear, which
    multiplies the tensor.
    """
    starts, takes = "forward_quantized", "takes_quantized"
    order = range(len(ops))
    if role == OUTPUT_GRAD:
        starts, takes = "backward_quantized", "takes_quantized_grad"
        order = order[::-1]
    found: list[list[int]] = []
    is_quantized = False
    for i in order:
        op = ops[i]
        if is_quantized and getattr(op, takes):
            found[-1].append(i)
            is_quantized = not isinstance(op, BasicLinear)
        elif not is_quantized and isinstance(op, Quantize) and getattr(op, starts):
            found.append([i])
            is_quantized = True
        else:
            is_quantized = False
    return found


def quantized_boundaries(ops: Sequence[BasicOperation]) -> set[int]:
    """Returns each i such that `ops[i - 1]` and `ops[i]` exchange an FP8 tensor."""
    forward = {i for _, *path in _paths(ops, INPUT) for i in path}
    return forward | {i + 1 for _, *path in _paths(ops, OUTPUT_GRAD) for i in path}


def with_quantizers(entries: Sequence[Op]) -> tuple[list[Op], list[_PassedState]]:
    """Gives each `Quantize` a quantizer, by default from the linear reading its tensor.

    Each `Quantize` is replaced by a copy, also in fused operations.

    Returns:
        The operations, and (linear, quantize, role) for each FP8 state that is passed,
        too: the indices of the two basic operations and the role of the tensor.
    """
    ops = expand(entries)
    result: list[Any] = list(ops)
    states = []
    for role in _ROLES:
        for path in _paths(ops, role):
            start, last = path[0], path[-1]
            recipe = result[start].fp8
            if recipe is None and isinstance(ops[last], BasicLinear):
                recipe = result[last].fp8
                if isinstance(recipe, DelayedScaling):
                    states.append((last, start, role))
            quantizer = Quantizer(recipe or Float8CurrentScaling(), _axes(ops, path))
            result[start] = result[start].linked(role, quantizer)
    found = [
        _with_basic_ops(entry, tuple(result[window]))
        for window, entry in windows(entries)
    ]
    return found, states


def _with_basic_ops(op: Op, basic_ops: tuple[Any, ...]) -> Op:
    if isinstance(op, BasicOperation):
        return basic_ops[0]
    if op.basic_ops == basic_ops:
        return op
    new = copy.copy(op)
    object.__setattr__(new, "basic_ops", basic_ops)
    return new


def _axes(ops, path) -> tuple[str, ...]:
    """Returns the mesh axes whose ranks must share the scale of an FP8 tensor.

    These are the axes over which the tensor is gathered or contracted, and `axis_name`.
    """
    last, *after = ops[path[-1] : path[-1] + 3]
    after = [op for op in after if not isinstance(op, Bias)][:1]
    sharing = [ops[path[0]]]
    sharing += [ops[i] for i in path if isinstance(ops[i], AllGather | ReduceScatter)]
    if isinstance(last, BasicLinear) and last.tensor_parallel_mode is not None:
        sharing.append(last)
    elif isinstance(last, BasicLinear):
        sharing += [op for op in after if isinstance(op, ReduceScatter)]
    return tuple(sorted({a for op in sharing for a in checks.axis_tuple(op.axis_name)}))
