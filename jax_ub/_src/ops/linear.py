"""Linear layers: `BasicLinear`, and `Linear`, which adds a bias."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_ub._src import arguments, checks, methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.fp8 import state as fp8_state
from jax_ub._src.fp8.recipes import DelayedScaling, Recipe, check_layer_recipe
from jax_ub._src.fp8.state import OUTPUT_GRAD_STATE, claim_layer_state, init_state
from jax_ub._src.methods import Method
from jax_ub._src.ops.basic import Bias
from jax_ub._src.ops.group import cotangent_aval
from jax_ub._src.ops.linear_gemms import (
    gradient_dtype,
    gradients,
    quantized,
    state_in,
)
from jax_ub._src.ops.operation import (
    BasicOperation,
    Operation,
    Params,
    Residuals,
    check_params,
    compute_dtype,
    init_parameter,
)
from jax_ub._src.parallel import ParallelMode, check_parallel, mode_of
from jax_ub._src.rules.call_config import (
    CallConfig,
    make_call_config,
    plan_call_config,
)
from jax_ub._src.rules.forward import forward_of, is_replicated
from jax_ub._src.rules.operands import (
    as_row,
    claim_main_grads,
    pcast_main_grad,
)
from jax_ub._src.rules.vjp import (
    as_factor,
    not_reduced,
    warn_of_constant_main_grad,
    warn_of_constant_state,
)
from jax_ub._src.scaled_array import ScaledArray, source_of, values_of


@dataclasses.dataclass(frozen=True, repr=False)
class _LinearOptions:
    """Fields that `BasicLinear` and `Linear` share; `BasicLinear` documents them."""

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    tensor_parallel_mode: str | None = None
    axis_name: str = "tp"
    sequence_parallel: bool = False
    userbuffers_options: Any = None  # a mapping; stored as a hashable tuple
    accumulate_into_main_grad: bool = False
    method: str | None = None
    fp8: Recipe | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., jax.Array] = initializers.lecun_normal()


@dataclasses.dataclass(frozen=True, repr=False)
class BasicLinear(_LinearOptions, BasicOperation):
    """A linear map without bias, `x @ kernel`, optionally tensor parallel.

    | mode | sequence_parallel | x | kernel | y |
    |---|---|---|---|---|
    | None | | `[..., K]` | `[K, N]` | `[..., N]` |
    | "column" | True | `[..., M/P, K]` | `[K, N/P]` | `[..., M, N/P]` |
    | "column" | False | `[..., K]`, replicated | `[K, N/P]` | `[..., N/P]` |
    | "row" | True | `[..., M, K/P]` | `[K/P, N]` | `[..., M/P, N]` |
    | "row" | False | `[..., K/P]` | `[K/P, N]` | `[..., N]`, replicated |

    Unfused, it runs the collective and the GEMM one after the other. With
    `userbuffers_options`, `ops.fused.UserbuffersForwardLinear` and
    `UserbuffersBackwardLinear` replace it and overlap communication with the GEMMs.

    Transformer Engine: `te.ops.BasicLinear`. Parameters: "kernel"; with
    `accumulate_into_main_grad` also "main_grad", the f32 accumulator of the kernel's
    gradient; with `DelayedScaling` also its state, by the names of `ub.fp8.init_state`.
    Residuals: "x" and "kernel", this rank's shards in the dtype of the computation, or
    FP8; "main_grad"; the new state; and "x_aval", an empty array with the dtype and the
    varying axes of the input.

    Attributes:
        in_features: the global number of input features, K.
        out_features: the global number of output features, N.
        tensor_parallel_mode: "column", "row" or None.
        axis_name: the mesh axis that the kernel is sharded over.
        sequence_parallel: whether the activations outside a column-row pair are sharded
            along their tokens (axis -2).
        userbuffers_options: `{"comm_name": name}`, where `name` is a key of
            `initialize_ub(ub_cfgs=...)` without "_fprop", "_dgrad" or "_wgrad". An
            optional entry "method" takes precedence over `method`.
        accumulate_into_main_grad: whether the kernel's gradient is added to the
            parameter "main_grad". The cotangent of "main_grad" is then its new value.
        method: how GEMM and communication overlap. None takes the method that
            `initialize_ub` configures for `comm_name`, else `JAX_UB_METHOD`, else
            "auto"; `JAX_UB_METHOD=xla` takes precedence over the configuration.
        fp8: the FP8 recipe by which x, the kernel and the gradient of y are quantized,
            as in `ub.linear`. The gradient of its state is the new state, which
            `ub.fp8.apply_updates` stores. Then the parameter "kernel" may be FP8
            already, a `ub.ScaledArray`. Transformer Engine: `te.autocast`.
        dtype: dtype of the computation and of y; None takes the dtype of x.
        param_dtype: dtype of the kernel.
        kernel_init: initializer of the global kernel.
    """

    overwritten = frozenset({"main_grad", *fp8_state.NAMES})

    def __post_init__(self):
        """Checks all constructor arguments that do not depend on the mesh."""
        if self.tensor_parallel_mode is not None:
            name = "tensor_parallel_mode"
            check_parallel(self.label, name, self.tensor_parallel_mode)
        for name in ("in_features", "out_features"):
            checks.check_size(self.label, name, getattr(self, name))
        options = _checked_options(self.label, self.userbuffers_options)
        object.__setattr__(self, "userbuffers_options", options)
        super().__post_init__()
        check_layer_recipe(self.label, self.fp8)
        for source, method in (
            ("method", self.method),
            ('userbuffers_options["method"]', dict(options or ()).get("method")),
        ):
            if methods.resolve(self.label, method, None) is Method.BULK:
                methods.refuse_bulk(self.label, source)

    @property
    def takes_quantized(self) -> bool:
        return self.fp8 is not None

    @property
    def takes_quantized_grad(self) -> bool:
        # The backward of GEMM+AR (GEMM + all-reduce) may have to sum dy over the ranks
        # before it is quantized, so it does not accept a quantized dy.
        return self.fp8 is not None and self.mode.op != "matmul_all_reduce"

    @property
    def mode(self) -> ParallelMode:
        """Returns the layer's `ParallelMode`: its shardings and its collectives."""
        return mode_of(self.tensor_parallel_mode, self.sequence_parallel)

    @property
    def comm_name(self) -> str | None:
        return dict(self.userbuffers_options or ()).get("comm_name")

    @property
    def chosen_method(self) -> Any:
        """Returns the method of `userbuffers_options` if it has one, else `method`."""
        return dict(self.userbuffers_options or ()).get("method", self.method)

    def init(self, key):
        shape = (self.in_features, self.out_features)
        kernel = init_parameter(self, "kernel_init", self.kernel_init, key, shape)
        params = {"kernel": kernel}
        if self.accumulate_into_main_grad:
            params["main_grad"] = jnp.zeros(shape, jnp.float32)
        return params if self.fp8 is None else {**params, **init_state(self.fp8)}

    def specs(self):
        is_sharded = self.tensor_parallel_mode is not None
        spec = self.mode.kernel_spec(self.axis_name) if is_sharded else PartitionSpec()
        names = ["kernel", "main_grad"][: 1 + self.accumulate_into_main_grad]
        state = fp8_state.NAMES if self._has_state else ()
        return {**dict.fromkeys(names, spec), **dict.fromkeys(state, PartitionSpec())}

    @property
    def _has_state(self):
        return isinstance(self.fp8, DelayedScaling)

    def claim(self, params):
        kernels = (params["kernel"],)
        claimed = claim_layer_state(self.label, state_in(params), kernels)
        if self.accumulate_into_main_grad:
            main_grads = claim_main_grads(self.label, (params["main_grad"],), kernels)
            claimed["main_grad"] = main_grads[0]
        return {**params, **claimed}

    def saved(self, needs):
        names = {"kernel", "x_aval"} if needs.x else set()
        if self._has_state:
            names.update(OUTPUT_GRAD_STATE)
        if self.accumulated in needs.params:
            names.add("x")
            if self._has_state and needs.params.isdisjoint(fp8_state.NAMES):
                warn_of_constant_state(self.label)
        elif "kernel" in needs.params:
            warn_of_constant_main_grad(self.label, "accumulate_into_main_grad")
        return frozenset(names | (self.overwritten & needs.params))

    @property
    def accumulated(self) -> str:
        """Returns the parameter that has the kernel's gradient in its cotangent."""
        return "main_grad" if self.accumulate_into_main_grad else "kernel"

    def call_config(self, dtype: DTypeLike) -> CallConfig:
        """Returns the `CallConfig` of the layer: its ranks, method and dtype."""
        named = (self.comm_name, self.chosen_method)
        if self.tensor_parallel_mode is None:
            config = plan_call_config(self.label, (), 1, *named)
        else:
            config = make_call_config(
                *(self.label, self.axis_name, *named),
                mode=self.mode,
                is_fp8=self.fp8 is not None,
            )
        config = dataclasses.replace(config, fp8=self.fp8)
        return config.with_dtypes(dtype, dtype)

    def check_operands(
        self, config: CallConfig, x: jax.Array, kernel: jax.Array | ScaledArray
    ):
        label, num_ranks = config.label, config.num_ranks
        checks.check_float(label, x=x, kernel=source_of(kernel))
        kernel = values_of(kernel)
        checks.check_rank(label, "x", x, 2 if config.mode.sequence_parallel else 1)
        checks.check_not_empty(label, "x", x)
        shape, dim = [self.in_features, self.out_features], self.mode.sharded_dim
        if dim is not None:
            if shape[dim] % num_ranks:
                raise ShapeContractError(
                    f"{label}: {self.mode.sharded}_features = {shape[dim]} is not a "
                    f"multiple of the {num_ranks} ranks. Pass a multiple of "
                    f"{num_ranks}."
                )
            shape[dim] //= num_ranks
        meaning = "this rank's shard, [in, out]"
        checks.check_shape(label, "kernel", kernel, tuple(shape), meaning)
        checks.check_contraction(label, x, kernel, num_ranks, self.mode.sharded)
        if config.mode.op == "matmul_reduce_scatter":
            checks.check_divides(label, x, num_ranks)

    def operands(
        self, config: CallConfig, params: Params, x: Any
    ) -> tuple[Any, Any, Residuals]:
        """Checks x and the parameters, and casts or quantizes them for the GEMMs.

        Returns:
            x and the kernel, for the GEMM of the forward pass, and the residuals.
        """
        kernel = params["kernel"]
        self.check_operands(config, source_of(x), kernel)
        residuals = {
            "x": as_factor(x, config.dtype),
            "kernel": as_factor(kernel, config.dtype),
            "x_aval": cotangent_aval(source_of(x)),
        }
        if self.accumulate_into_main_grad:
            axes = config.axes(x, kernel)
            residuals["main_grad"] = pcast_main_grad(
                config.label, params["main_grad"], axes
            )
        saved = quantized(config, residuals, params)
        # The GEMM reads copies, because `jax.checkpoint` applies `reduce_precision`,
        # which corrupts FP8 values, to saved arrays that are read (see `not_reduced`).
        return *not_reduced((saved["x"], saved["kernel"])), saved

    def forward(
        self,
        params,
        x,
        extra_inputs,
        saves,
        *,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        scale: float = 1.0,
        out_dtype: DTypeLike | None = None,
    ):
        """Computes `scale * x @ kernel + bias + residual`, and runs the collective.

        A column-parallel layer first all-gathers x, then runs the GEMM; a row-parallel
        layer sums the products over the ranks after the GEMM. Bias and residual are
        added once, in f32, after any reduction over the ranks.

        Fused operations pass the keyword arguments. `bias`, `[N]`, has this rank's
        features, and `residual` the shape of the result. Without a reduction over the
        ranks, the result reuses the buffer of `residual` if it is not read later. An
        `out_dtype` of None takes the dtype of the computation.
        """
        config = self.call_config(compute_dtype(self.dtype, x))
        x, kernel, residuals = self.operands(config, params, x)
        config = dataclasses.replace(
            config,
            overlap=False,
            scale=scale,
            out_dtype=config.out_dtype if out_dtype is None else np.dtype(out_dtype),
        )
        is_vector = x.ndim == 1
        if is_vector:
            x, residual = as_row((x, residual))
        biases = None if bias is None else (bias,)
        (y,), _ = forward_of(config)(config, x, (kernel,), biases, residual)
        return y[0] if is_vector else y, (), residuals

    def backward(
        self,
        residuals,
        dy,
        d_extra_outputs,
        needs,
        *,
        residual: jax.Array | None = None,
        scale: float = 1.0,
    ):
        """Computes the gradients of x and kernel, without overlapping collectives.

        Fused operations pass the keyword arguments. `residual`, of the shape of x, is
        added to dx; the sum has its dtype. If dx is not reduced over the ranks, the sum
        reuses the buffer of `residual` if it is not read later. `scale` is a factor of
        both products.
        """
        config = self.call_config(gradient_dtype(residuals, dy))
        # Without sequence parallelism, each rank of a column-parallel layer computes a
        # partial sum of dx. If x has a replicated type, the partial sums are added over
        # the ranks. Otherwise JAX's convention applies: the gradient is the sum of the
        # ranks' cotangents, so dx stays partial.
        config = dataclasses.replace(
            config,
            overlap=False,
            scale=scale,
            dw_dtype=np.dtype(self.param_dtype),
            is_x_replicated=needs.x and is_replicated(config, residuals["x_aval"]),
        )
        dy = as_factor(dy, config.dtype)
        is_vector = dy.ndim == 1
        if is_vector:
            dy, x, residual = as_row((dy, residuals.get("x"), residual))
            residuals = {**residuals, "x": x}
        dx, dw, state = gradients(config, dy, residuals, residual)
        d_params = {**state, self.accumulated: dw}
        return dx[0] if is_vector and dx is not None else dx, d_params, ()


def _checked_options(label, options):
    if options is None:
        return None
    known = ("comm_name", "method")
    try:
        found = dict(options) if isinstance(options, Mapping | tuple) else {}
    except (TypeError, ValueError):
        found = {}
    if "comm_name" not in found:
        raise ShapeContractError(
            f"{label}: userbuffers_options = {shown(options)} has no comm_name. Pass "
            'userbuffers_options={"comm_name": "qkv"}, or None for no overlap.'
        )
    for name in found:
        if name not in known:
            raise UnknownNameError(
                f"{label}: userbuffers_options has no {shown(name)}. "
                f"{nearest(name, known)}"
            )
    name = found["comm_name"]
    if not isinstance(name, str) or not name:
        raise ShapeContractError(
            f"{label}: comm_name = {shown(name)} is not the name of an overlap. Pass a "
            'string, for example "qkv".'
        )
    return tuple(found.items())


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(_LinearOptions, Operation):
    """A linear layer, `x @ kernel + bias`, as one entry of a `Sequential`.

    The bias of a row-parallel layer is replicated and added once, after the reduction.
    The bias of a column-parallel layer is sharded like the kernel's columns.

    Transformer Engine: `te.ops.Linear`, which has no `userbuffers_options`, and which
    sums one bias per rank in a row-parallel layer. Parameters, in one dict with the
    names of `flax.nnx.Linear`: "kernel", "bias" and, if enabled, "main_grad".

    Its attributes are those of `BasicLinear`, and these:

    Attributes:
        use_bias: whether a bias is added.
        bias_init: initializer of the global bias.
    """

    _: dataclasses.KW_ONLY
    use_bias: bool = True
    bias_init: Callable[..., jax.Array] = initializers.zeros

    def __post_init__(self):
        arguments.check("Linear", use_bias=self.use_bias)
        options = self.basic_ops[0].userbuffers_options
        object.__setattr__(self, "userbuffers_options", options)

    @property
    def basic_ops(self):
        names = [field.name for field in dataclasses.fields(_LinearOptions)]
        options = {name: getattr(self, name) for name in names}
        linear = BasicLinear(**options)
        if not self.use_bias:
            return (linear,)
        bias = Bias(
            self.out_features,
            tensor_parallel=self.tensor_parallel_mode == "column",
            axis_name=self.axis_name,
            param_dtype=self.param_dtype,
            bias_init=self.bias_init,
        )
        return linear, bias

    def init(self, key):
        checks.check_key("Linear", "key", key)
        keys = jax.random.split(key)
        parts = (op.init(k) for op, k in zip(self.basic_ops, keys, strict=False))
        return {name: value for part in parts for name, value in part.items()}

    def specs(self):
        return {k: v for op in self.basic_ops for k, v in op.specs().items()}

    def split(self, params):
        check_params("Linear", params, takes_quantized=self.fp8 is not None)
        if not self.use_bias:
            return (params,)
        bias = {name: v for name, v in params.items() if name == "bias"}
        return {name: v for name, v in params.items() if name != "bias"}, bias
