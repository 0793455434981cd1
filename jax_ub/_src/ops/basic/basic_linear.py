"""A linear map, `x @ kernel`, whose kernel may be sharded over the ranks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src import methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.methods import Method
from jax_ub._src.ops.basic import linear_products as products
from jax_ub._src.ops.fields import initialize
from jax_ub._src.ops.operation import (
    BasicOperation,
    Params,
    RequestedGradients,
    compute_dtype,
)
from jax_ub._src.parallel import ParallelMode, check_parallel, mode_of
from jax_ub._src.rules import main_grads as accumulators
from jax_ub._src.rules.call_config import (
    CallConfig,
    make_call_config,
    make_local_call_config,
)

default_kernel_init = initializers.lecun_normal()


@dataclasses.dataclass(frozen=True, repr=False)
class BasicLinear(BasicOperation):
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

    Transformer Engine: `te.ops.BasicLinear`. Parameters: "kernel", and with
    `accumulate_into_main_grad` also "main_grad", the f32 accumulator of the kernel's
    gradient. Residuals: "x" and "kernel", this rank's shards in the dtype of the
    computation; "main_grad"; and "like", an empty array with the dtype and the varying
    axes of the input.

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
            "auto".
        dtype: dtype of the computation and of y; None takes the dtype of x.
        param_dtype: dtype of the kernel.
        kernel_init: initializer of the global kernel.
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    tensor_parallel_mode: str | None = None
    axis_name: str = "tp"
    sequence_parallel: bool = False
    userbuffers_options: Any = None  # a mapping; stored as a hashable tuple
    accumulate_into_main_grad: bool = False
    method: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., jax.Array] = default_kernel_init

    overwritten = frozenset({"main_grad"})

    def __post_init__(self):
        """Checks the constructor arguments that do not depend on the mesh.

        Raises:
            UnknownNameError: if a mode, method or option is unknown, or a flag is not a
                bool.
            UnsupportedOverlapError: if the method is "bulk", which the forward does not
                support.
            ShapeContractError: if a size is not a positive integer, or an option is
                invalid.
        """
        if self.tensor_parallel_mode is not None:
            name = "tensor_parallel_mode"
            check_parallel(self.label, name, self.tensor_parallel_mode)
        for name in ("in_features", "out_features"):
            shapes.check_size(self.label, name, getattr(self, name))
        options = _checked_options(self.label, self.userbuffers_options)
        object.__setattr__(self, "userbuffers_options", options)
        super().__post_init__()
        for source, method in (
            ("method", self.method),
            ('userbuffers_options["method"]', dict(options or ()).get("method")),
        ):
            if methods.resolve(self.label, method, None) is Method.BULK:
                methods.refuse_bulk(self.label, source)

    @property
    def mode(self) -> ParallelMode:
        """The layer's row in the table of parallel modes."""
        return mode_of(self.tensor_parallel_mode, self.sequence_parallel)

    @property
    def comm_name(self) -> str | None:
        """The "comm_name" in `userbuffers_options`, or None.

        It selects the overlap that `initialize_ub` configures under this name.
        """
        options = self.userbuffers_options
        return None if options is None else dict(options)["comm_name"]

    def init(self, key):
        """Creates the global kernel `[in_features, out_features]` and the main_grad.

        The main_grad, an f32 accumulator of the kernel's gradient, is created only with
        `accumulate_into_main_grad`.
        """
        shape = (self.in_features, self.out_features)
        kernel = initialize(self, "kernel_init", self.kernel_init, key, shape)
        params = {"kernel": kernel}
        if self.accumulate_into_main_grad:
            params["main_grad"] = jnp.zeros(shape, jnp.float32)
        return params

    def specs(self):
        """Returns the specs: "column" shards the kernel's columns, "row" its rows."""
        is_sharded = self.tensor_parallel_mode is not None
        spec = self.mode.kernel_spec(self.axis_name) if is_sharded else PartitionSpec()
        names = ["kernel", "main_grad"][: 1 + self.accumulate_into_main_grad]
        return dict.fromkeys(names, spec)

    def claim(self, params):
        """Checks the gradient accumulator; rejects one that another call uses."""
        if self.accumulate_into_main_grad:
            accumulators.claim(self.label, params["main_grad"], params["kernel"])

    def saved(self, needs):
        """Returns the names of the operands that the backward's GEMMs read.

        dx reads the kernel, and the kernel's gradient reads x.
        """
        names = set()
        if needs.x:
            names |= {"kernel", "like"}
        if self.wants_wgrad(needs):
            names.add("x")
        return frozenset(names | (self.overwritten & needs.params))

    def wants_wgrad(self, needs: RequestedGradients) -> bool:
        """Returns whether the backward computes the gradient of the kernel.

        With `accumulate_into_main_grad`, its result is the cotangent of "main_grad".
        """
        name = "main_grad" if self.accumulate_into_main_grad else "kernel"
        return name in needs.params

    def call_config(self, dtype: DTypeLike | None = None) -> CallConfig:
        """Returns the ranks, the method and the dtype with which the layer runs.

        Raises:
            ShapeContractError: if the axis is not a manual mesh axis.
        """
        method = dict(self.userbuffers_options or ()).get("method", self.method)
        named = (self.comm_name, method)
        if self.tensor_parallel_mode is None:
            call_config = make_local_call_config(self.label, *named, mode=self.mode)
        else:
            call_config = make_call_config(
                self.label, self.axis_name, *named, mode=self.mode
            )
        return call_config if dtype is None else call_config.with_dtypes(dtype, dtype)

    def operands(
        self, params: Params, x: jax.Array
    ) -> tuple[CallConfig, jax.Array, jax.Array, jax.Array | None]:
        """Checks x and the parameters; casts x and kernel to the layer's dtype.

        Returns:
            The call configuration, x, the kernel, and the main_grad or None.

        Raises:
            ShapeContractError: if their shapes do not match each other or the mesh.
        """
        dtype = compute_dtype(self.dtype, x)
        call_config, kernel = self.call_config(), params["kernel"]
        call_config = call_config.with_dtypes(dtype, dtype)
        self._check(call_config, x, kernel)
        main_grad = None
        if self.accumulate_into_main_grad:
            axes = call_config.axes(x, kernel)
            main_grad = accumulators.promote(
                call_config.label, params["main_grad"], axes
            )
        return call_config, x.astype(dtype), kernel.astype(dtype), main_grad

    def _check(self, call_config, x, kernel):
        shapes.check_float(call_config.label, x=x, kernel=kernel)
        shapes.check_rank(
            call_config.label, "x", x, 2 if self.is_sharded_by_tokens else 1
        )
        shapes.check_not_empty(call_config.label, "x", x)
        sharded = self.mode.sharded
        rows, columns = self.in_features, self.out_features
        for name, size in (("in", rows), ("out", columns)):
            if name == sharded and size % call_config.num_ranks:
                raise ShapeContractError(
                    f"{call_config.label}: {name}_features = {size} do not divide into "
                    f"{call_config.num_ranks} ranks. Choose a multiple of "
                    f"{call_config.num_ranks}."
                )
        rows //= call_config.num_ranks if sharded == "in" else 1
        columns //= call_config.num_ranks if sharded == "out" else 1
        shapes.check_shape(
            call_config.label,
            "kernel",
            kernel,
            (rows, columns),
            "this rank's part, [in, out]",
        )
        shapes.check_contraction(
            call_config.label, x, kernel, call_config.num_ranks, sharded
        )
        if self.mode.op == "matmul_reduce_scatter":
            shapes.check_divides(call_config.label, x, call_config.num_ranks)

    @property
    def is_sharded_by_tokens(self) -> bool:
        """Whether each rank has only some tokens of x or of y (axis -2)."""
        return self.tensor_parallel_mode is not None and self.sequence_parallel

    def forward(self, params, x, extra_inputs, saves):
        """Computes `x @ kernel`; gathers x first, or reduces the product after.

        A column-parallel layer all-gathers x. A row-parallel layer sums the ranks'
        products.
        """
        y, residuals = products.forward(self, params, x)
        return y, (), residuals

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the gradients of x and of the kernel, without overlap."""
        return *products.backward(self, residuals, dy, needs), ()


def _checked_options(label, options):
    if options is None:
        return None
    known = ("comm_name", "method")
    is_items = isinstance(options, tuple) and all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        for item in options
    )
    if isinstance(options, Mapping) or is_items:
        options = dict(options)
    if not isinstance(options, dict) or "comm_name" not in options:
        raise ShapeContractError(
            f"{label}: userbuffers_options = {shown(options)} names no overlap. Pass "
            'userbuffers_options={"comm_name": "qkv"}, or None for none.'
        )
    for name in options:
        if name not in known:
            raise UnknownNameError(
                f"{label}: userbuffers_options has no {shown(name)}. "
                f"{nearest(name, known)}"
            )
    name = options["comm_name"]
    if not isinstance(name, str) or not name:
        raise ShapeContractError(
            f"{label}: comm_name = {shown(name)} is not the name of an overlap. Pass a "
            'string, for example "qkv".'
        )
    return tuple(options.items())
