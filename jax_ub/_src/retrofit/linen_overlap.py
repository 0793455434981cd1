"""A Flax interceptor that overlaps the layers of an unmodified linen model."""

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import lift
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ub._src import lowering_log
from jax_ub._src.arguments import FixedArguments, KeywordsChecked
from jax_ub._src.checks import axis_tuple
from jax_ub._src.errors import UnsupportedOverlapError, nearest, see, shown
from jax_ub._src.fp8.flax_state import linen_state
from jax_ub._src.fp8.recipes import Recipe, check_layer_recipe
from jax_ub._src.retrofit.dot_general import DotGeneral
from jax_ub._src.retrofit.einsum import Einsum
from jax_ub._src.retrofit.selection import DOT, DOT_GENERAL, EINSUM, read_rules
from jax_ub._src.runtime.registry import LayerName
from jax_ub._src.sharding.layout import ShardingLayout, sharding_of

_PAGE = "docs/retrofit.md"
_LIFT_FILE = lift.__file__
_EQUATION = re.compile("[^,>]*,[^,>]*->[^,>]*")  # of an einsum of two operands


class _Traces:
    """Identifies the settings of `Overlap` blocks in the keys of JAX's trace caches.

    Blocks with equal settings share one object. JAX compares keys by the identity of
    this object, which is fast, since each call of a jitted function compares them.
    `rules` are the rules of the blocks, and `matched` has the patterns that matched a
    layer in any trace.
    """

    def __init__(self, rules: Mapping[re.Pattern[str], str | None]):
        self.rules = rules
        self.matched: set[re.Pattern[str]] = set()

    def kind(self, path: str) -> str | None:
        """Returns "column" or "row" by the first rule that matches a path, or None."""
        pattern = _first_match(self.rules, path)
        return None if pattern is None else self.rules[pattern]


@functools.lru_cache(maxsize=1024)
def _traces_of(groups: tuple[tuple, ...], settings: Hashable) -> _Traces:
    return _Traces(dict(groups[0]))


# JAX adds this context to the keys of its trace caches, so that it traces a function
# again where other rules apply. The value has the `_Traces` of all enclosing blocks
# `with Overlap(...)`, outermost first. Outside of such blocks it is ().
_TRACED_FOR = jax.make_user_context(())

# The module whose method is being overlapped. An interceptor with equal settings in a
# nested block must not overlap the same method again.
_OVERLAPPED: ContextVar[Any] = ContextVar("_OVERLAPPED", default=None)


class Overlap(FixedArguments, KeywordsChecked):
    r"""Overlaps the dense layers of an unmodified linen model with communication.

        with Overlap({r".*\.(query|key|value)": "column", r".*\.out": "row"}):
            logits = model.apply(variables, tokens)

    While the model is traced inside the block, layers that match a rule compute their
    product with `ub.dot_general`. Supported are `nn.Dense`, `nn.DenseGeneral`,
    `nn.Einsum` and `nn.Embed.attend`. Modules and parameters do not change. A function
    that `jax.jit` traced outside the block is traced again inside, and a function that
    it traced in a block with equal arguments is not. `nn.jit` traces only one of equal
    modules, so a rule for the path of one applies to all of them, with a warning. In
    nested blocks, the innermost block that has a rule for a layer applies.

    A call falls back to JAX if it cannot be overlapped, or if its product is
    intercepted, for example by Qwix. `ub.fallbacks` lists the reason. It also lists
    parameters of modules that no rule overlaps, if the trace shows that they are
    sharded over `axis_name`. For nnx models use `ub.overlap`.

    The end of the block warns about each rule that matched no layer. An `Overlap` is
    also an interceptor for `nn.intercept_methods`, which does not tell it where the
    block ends: then a call of a model warns only if no rule matched any layer.

    Transformer Engine: none.

    Args:
        rules: maps regular expressions to "column", "row" or None (not overlapped). An
            expression must match the whole path of a layer, such as
            "decoder.layer_0.Dense_0". The first matching rule applies. The path of a
            tied head is the path of its `nn.Embed` followed by ".attend".
        mesh: the mesh; None takes the mesh of `jax.set_mesh` or of the arrays.
        fsdp_axes: the mesh axes that shard the kernel dimension that the rule does not
            shard (FSDP). On an explicit mesh they are inferred from the arrays' types.
        fp8: the FP8 recipe of the overlapped layers, or a dictionary of recipes, as in
            `ub.overlap`. The state of `DelayedScaling` is in the collection
            "_overwrite_with_gradient", which `model.init` inside the block creates.
        axis_name, method, sequence_parallel, data_axes, ub_names: as in `ub.overlap`.

    Attributes:
        overlapped: maps the path of each layer that was overlapped so far to "column"
            or "row".

    Raises:
        UnknownNameError: if a rule is not a valid regular expression or does not map to
            a valid kind, if the method is unknown, or if `mesh`, else the mesh of
            `jax.set_mesh`, lacks an axis of `axis_name` or `data_axes`.
        ShapeContractError: if `mesh` is not a mesh, or if `data_axes` or `fsdp_axes`
            are not distinct names of other axes.
        ConfigurationError: if `fp8` has a value that is not a recipe.
    """

    overlapped: dict[str, str]

    _settable = frozenset()

    def __init__(  # noqa: PLR0913, options of layers
        self,
        rules: Mapping[str, str | None],
        *,
        axis_name: str | tuple[str, ...] = "tp",
        mesh: Mesh | None = None,
        method: str | None = None,
        sequence_parallel: bool = True,
        data_axes: tuple[str, ...] | None = None,
        fsdp_axes: tuple[str, ...] | str = (),
        ub_names: Mapping[str, str] | None = None,
        fp8: Recipe | Mapping[str, Recipe | None] | None = None,
    ):
        self._rules = read_rules("rules", rules)
        self._names = read_rules("ub_names", ub_names)
        is_by_path = isinstance(fp8, Mapping)
        self._recipes = read_rules("fp8", fp8 if is_by_path else None)
        recipe: Any = None if is_by_path else fp8
        check_layer_recipe("overlap", recipe)
        self._sharding_layout = ShardingLayout(
            parallel="column",
            axis_name=axis_name,
            mesh=mesh,
            data_axes=data_axes,
            sequence_parallel=sequence_parallel,
            method=method,
            fsdp_axes=fsdp_axes,
            fp8=recipe,
        )
        self._sharding_layout.check_axes(self._sharding_layout.find_mesh())
        self.overlapped = {}
        self._matched: set[re.Pattern[str]] = set()
        self._seen: dict[str, None] = {}  # the paths of all layers that rules may match
        self._recorded: set[str] = set()
        self._warned: set[str] = set()
        self._is_called = False  # whether a module was called in the block
        self._depth = 0  # number of module calls in progress
        self._jitted = ""  # the path of the outermost `nn.jit` module in progress
        self._has_jitted = False  # whether `nn.jit` traced a module in the block
        self._blocks: list[ExitStack] = []

    def __getstate__(self):
        state = {**vars(self), "_blocks": [], "_depth": 0, "_jitted": ""}
        state.pop("_traces", None)  # compared by identity
        return state

    def __enter__(self) -> "Overlap":
        """Starts to intercept the methods of linen modules, until the block ends."""
        block = ExitStack()
        block.enter_context(nn.intercept_methods(self))
        outer = _TRACED_FOR.value
        block.enter_context(_TRACED_FOR((*outer, self._traces)))
        self._blocks.append(block)
        return self

    @functools.cached_property
    def _traces(self) -> _Traces:
        groups = self._rules, self._names, self._recipes
        items = tuple(tuple(group.items()) for group in groups)
        return _traces_of(items, self._sharding_layout)

    def __exit__(self, kind, error, traceback) -> None:
        """Stops the interception and warns about rules that matched no layer."""
        self._blocks.pop().close()
        if error is None:
            self._warn()

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Returns the patterns in rules, `ub_names` and `fp8` that matched no layer."""
        patterns = [*self._rules, *self._names, *self._recipes]
        return tuple(each.pattern for each in patterns if each not in self._matched)

    def __call__(
        self, next_fun: Callable, args: tuple, kwargs: dict, context: Any
    ) -> Any:
        """Runs a linen module's method, overlapped if a rule matches the module's path.

        Flax calls it for each intercepted method.

        Raises:
            UnsupportedOverlapError: if a rule matches a layer that already has a custom
                `dot_general`.
        """
        layer, method_name = context.module, context.method_name
        if method_name == "setup":  # Flax calls it before the method itself
            return next_fun(*args, **kwargs)
        self._depth += 1
        self._is_called = True
        jitted = self._jitted
        if not jitted and _is_called_by_nn_jit():
            self._jitted = ".".join(layer.path)
            self._has_jitted = True
        try:
            # The context is part of the key of JAX's trace caches. Without it, JAX
            # would reuse a trace that was made with this interceptor outside of the
            # block, and in blocks with other settings.
            outer = _TRACED_FOR.value
            is_known = self._traces in outer
            with nullcontext() if is_known else _TRACED_FOR((*outer, self._traces)):
                y = self._call(layer, method_name, next_fun, args, kwargs)
        finally:
            self._depth -= 1
            self._jitted = jitted
        if self._depth == 0 and not self._blocks and not self._matched:
            self._warn()
        return y

    def _call(self, layer, method_name, next_fun, args, kwargs):
        path = ".".join(layer.path)
        if method_name == "attend":
            path = f"{path}.attend" if path else "attend"
        call = _overlapped_call(layer, method_name)
        if call is not None:
            self._seen[path] = None
            self._check_shared_trace(path)
        kind = None if call is None else self._find(self._rules, path)
        if call is None or kind is None:
            y = next_fun(*args, **kwargs)
            if method_name == "__call__" and layer.scope is not None:
                self._record_parameters(layer, path, is_supported=call is not None)
            return y
        name = self._find(self._names, path) or LayerName(path)
        recipe = self._find(self._recipes, path) or self._sharding_layout.fp8
        layout = dataclasses.replace(
            self._sharding_layout, parallel=kind, ub_name=name, fp8=recipe
        )
        if _deciding_block(path) is not self._traces:
            return next_fun(*args, **kwargs)
        if _OVERLAPPED.get() is layer:
            y = next_fun(*args, **kwargs)
        else:
            dense = DotGeneral(layout, is_lenient=True)
            state = linen_state(layout.op, layer, layout.fp8)
            token = _OVERLAPPED.set(layer)
            try:
                y = call(dense, state, layer, next_fun, args, kwargs)
            finally:
                _OVERLAPPED.reset(token)
        self.overlapped[path] = kind
        return y

    def _find(self, patterns, path):
        """Returns the first matching pattern's value, or None; records the match."""
        pattern = _first_match(patterns, path)
        if pattern is None:
            return None
        self._matched.add(pattern)
        self._traces.matched.add(pattern)
        return patterns[pattern]

    def _check_shared_trace(self, path):
        """Warns if `nn.jit` uses one trace for layers with different settings.

        Equal modules with other paths share its trace, and thus the layer's settings.
        """
        if not self._jitted:
            return
        elsewhere = "\0" + path.removeprefix(self._jitted)
        groups: tuple[dict[Any, Any], ...] = self._rules, self._names, self._recipes
        for group in groups:
            own, other = (_first_match(group, each) for each in (path, elsewhere))
            found = own or other
            if found is None or group.get(own) == group.get(other):
                continue
            if found.pattern not in self._warned:
                self._warned.add(found.pattern)
                lowering_log.warn(
                    f"overlap: the settings of {shown(path)} apply to all modules that "
                    f"are equal to {shown(self._jitted)}, because nn.jit traces only "
                    f"one of them, but the pattern {shown(found.pattern)} depends on "
                    "its path. Let patterns start with '.*', or leave out nn.jit. "
                    f"{see(_PAGE)}"
                )

    def _warn(self):
        """Warns once about each rule that has matched no layer."""
        known = set(self._warned)
        if not self._seen:  # all layers were traced in an earlier block, or none is
            known.update(each.pattern for each in self._traces.matched)
        new = [pattern for pattern in self.unmatched if pattern not in known]
        self._warned.update(new)
        if not new:
            return
        if not self._is_called:
            lowering_log.warn(
                f"overlap: the rules {new} matched nothing, because no module was "
                "called in the block. A compiled function is not traced again. Call "
                f"the model in the block, or jit it there. {see(_PAGE)}"
            )
            return
        layers = sorted(self.overlapped)
        met = f"It overlapped {layers}" if layers else "It overlapped nothing"
        shared = "nn.jit traces only one of equal modules. " if self._has_jitted else ""
        lowering_log.warn(
            f"overlap: the rules {new} matched no nn.Dense, nn.DenseGeneral, nn.Einsum "
            f"or nn.Embed.attend; a rule must match a whole path. {shared}{met}. "
            f"{nearest(new[0], self._seen)} {see(_PAGE)}"
        )

    def _record_parameters(self, layer, path, is_supported):
        """Adds sharded parameters of a layer without overlap to `ub.fallbacks`."""
        if path in self._recorded or _is_of_jax_ub(layer):
            return
        is_embed = isinstance(layer, nn.Embed)
        head = f"{path}.attend" if is_embed else path
        if is_embed and self._find(self._rules, head):
            return
        block = _deciding_block(head) if is_supported or is_embed else None
        if block is not None and block.kind(head) is not None:
            return  # another block overlaps the layer
        parameters = layer.variables.get("params", {})
        arrays = {k: v for k, v in parameters.items() if not isinstance(v, Mapping)}
        # Unsharded kernels are reported only if a rule selects the module. A rule that
        # maps the path to None excludes the module.
        is_selected = self._traces.kind(path) is not None
        # With `nn.share_scope`, this module may have the path of an overlapped layer.
        # The parameters of that layer are not reported.
        known = ("kernel", "bias") if path in self.overlapped else ()
        axes = set(self._sharding_layout.axes)
        why = (
            "which no rule overlaps" if is_supported else "which overlap does not know"
        )
        for name, value in arrays.items():
            if name in known:
                continue
            spec = _spec_of(value)
            if any(not axes.isdisjoint(axis_tuple(entry)) for entry in spec):
                parameter = f"the parameter, sharded {P(*spec)},"
            elif is_selected and jnp.ndim(nn.meta.unbox(value)) > 1:
                parameter = "the parameter"
            else:
                continue
            label = f"overlap({shown('.'.join(filter(None, (path, name))))})"
            reason = f"{parameter} belongs to a {type(layer).__name__}, {why}"
            lowering_log.record_fallback(label, reason)
        if arrays:
            self._recorded.add(path)


def _deciding_block(path: str) -> _Traces | None:
    """Returns the innermost of the nested blocks that has a rule for a path, or None.

    Flax calls the interceptor of the outermost block first.
    """
    blocks = reversed(_TRACED_FOR.value)
    return next((each for each in blocks if _first_match(each.rules, path)), None)


def _first_match(patterns: Mapping, path: str) -> re.Pattern[str] | None:
    return next((each for each in patterns if each.fullmatch(path)), None)


def _is_called_by_nn_jit() -> bool:
    """Returns whether `nn.jit` traces the module whose method is intercepted.

    A frame of `nn.jit` is then between the interceptor's call and its previous one, for
    an outer module. Flax passes nothing to interceptors that would show it.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not Overlap.__call__.__code__:
        if frame.f_code.co_name == "jitted" and frame.f_code.co_filename == _LIFT_FILE:
            return True
        frame = frame.f_back
    return False


def _call_dense(dense, state, layer, next_fun, args, kwargs):
    before = layer.dot_general
    own = before if layer.dot_general_cls is None else layer.dot_general_cls
    is_plain = own is None or own is DOT_GENERAL.function
    if not is_plain and not isinstance(own, DotGeneral):
        path = ".".join(layer.path)
        raise UnsupportedOverlapError(
            f"overlap: the layer {shown(path)} has a custom dot_general, {own}. "
            f"Exclude the layer: {{{shown(path)}: None, ...}}."
        )
    original = own if is_plain else None
    ours: Callable = dataclasses.replace(dense, original=original)
    if state is not None:
        ours = functools.partial(ours, fp8_state=state)
    # Flax forbids `layer.dot_general = ...` on bound modules. The attribute is restored
    # afterwards, because the module may be called again outside the block.
    object.__setattr__(layer, "dot_general", ours)
    try:
        return next_fun(*args, **kwargs)
    finally:
        object.__setattr__(layer, "dot_general", before)


def _call_einsum(dense, state, layer, next_fun, args, kwargs):
    inputs, text = _einsum_arguments(*args, **kwargs)
    text = layer.einsum_str if text is None else text
    kernel = nn.meta.unbox(layer.get_variable("params", "kernel"))
    if kernel is None or text is None or not _EQUATION.fullmatch(text):
        return next_fun(*args, **kwargs)  # initialization, or an error of Flax
    reason = Einsum(dense).why_not(text, jnp.ndim(inputs))
    if reason is not None:
        with dense.falling_back(reason):
            return next_fun(*args, **kwargs)
    bias = nn.meta.unbox(layer.get_variable("params", "bias"))
    given = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    inputs, kernel, bias = given
    held = dataclasses.replace(dense, original=DOT_GENERAL.function)
    y = Einsum(held, original=EINSUM.function)(
        text.replace(" ", ""),
        inputs,
        kernel,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
        fp8_state=state,
    )
    if bias is None:
        return y
    _, shape = layer._get_bias_shape(text.replace(" ", ""), inputs, kernel)
    return y + jnp.reshape(bias, shape)


def _einsum_arguments(inputs, einsum_str=None):
    return inputs, einsum_str


def _call_attend(dense, state, layer, next_fun, args, kwargs):
    reason = dense.why_intercepted(DOT, None)
    if reason is not None:
        with dense.falling_back(reason):
            return next_fun(*args, **kwargs)
    given = args[0] if args else kwargs["query"]
    query, embedding = layer.promote_dtype(given, layer.embedding, dtype=layer.dtype)
    held = dataclasses.replace(dense, original=DOT_GENERAL.function)
    dims = (((query.ndim - 1,), (1,)), ((), ()))
    return held(query, embedding, dims, fp8_state=state)


def _overlapped_call(layer, method_name) -> Callable | None:
    """Returns the overlapped version of a linen module's method, or None.

    None stands for methods that are no linear layer; they run unchanged.
    """
    # Subclasses of nn.Embed and nn.Einsum run unchanged, because they may override the
    # method to compute a different product.
    if method_name == "attend":
        return _call_attend if type(layer) is nn.Embed else None
    if method_name != "__call__":
        return None
    if type(layer) is nn.Einsum:
        return _call_einsum
    is_general = isinstance(layer, nn.DenseGeneral) and not layer.batch_dims
    return _call_dense if is_general or isinstance(layer, nn.Dense) else None


def _is_of_jax_ub(layer) -> bool:
    """Returns whether a module is a layer of jax_ub, which overlaps without a rule."""
    if isinstance(layer, nnx.bridge.ToLinen):
        kind = layer.nnx_class
        return isinstance(kind, type) and issubclass(kind, FixedArguments)
    return hasattr(type(layer), "sharding_layout")


def _spec_of(value) -> tuple:
    """Returns a parameter's partition spec, from its metadata or its array, or ()."""
    names: Any = value.names if isinstance(value, nn.Partitioned) else ()
    if isinstance(value, nn.LogicallyPartitioned):
        with suppress(ValueError):  # Flax rejects the names or the rules
            names = nn.logical_to_mesh_axes(names, value.rules) or ()
    if any(names):
        return tuple(names)
    arrays = jax.tree.leaves(nn.meta.unbox(value))
    specs = (getattr(sharding_of(array), "spec", None) for array in arrays)
    return tuple(next(filter(None, specs), ()))
