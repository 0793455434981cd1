"""The nnx layers `MultiHeadAttention` and `TransformerLayer`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
from flax import nnx

from jax_ub._src import arguments, checks
from jax_ub._src.errors import (
    ConfigurationError,
    UnknownNameError,
    UnsupportedOverlapError,
)
from jax_ub._src.flax.core_attention import CoreAttention, dropout
from jax_ub._src.flax.linear import (
    Linear,
    apply_layers,
    apply_with_residual,
    inner_linear,
    parameter_value,
)
from jax_ub._src.flax.norm_layers import LayerNormMLP, apply_norm, normalize
from jax_ub._src.flax.options import (
    FixedArguments,
    LinearOptions,
    check_attention_sizes,
    check_options,
    check_transformer_sizes,
    make_norm,
    norm_dtypes,
    qk_norm_class,
)
from jax_ub._src.sharding.layout import ShardingLayout

_LAYOUT_OPTIONS = ("axis_name", "mesh", "data_axes", "sequence_parallel", "method")


def project_qkv(
    layers: Sequence[Any], inputs: Sequence[Any], rotary_base: float | None
) -> tuple[jax.Array, ...]:
    """Computes queries, keys and values; layers with equal inputs share an all-gather.

    An input of None is the same as the previous one.
    """
    inputs_q, inputs_k, inputs_v = inputs
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, array in zip("qkv", (inputs_q, inputs_k, inputs_v), strict=True):
        checks.check_rank("MultiHeadAttention", f"inputs_{name}", array)
    if inputs_k is not inputs_q and rotary_base is not None:
        raise UnsupportedOverlapError(
            "MultiHeadAttention: rotary_base is given, but inputs_k differ from "
            "inputs_q, so queries and keys have different positions. Use "
            "rotary_base=None for attention to other inputs."
        )
    query, key, value = layers
    if inputs_k is inputs_q and inputs_v is inputs_k:
        return apply_layers(layers, inputs_q)
    if inputs_v is inputs_k:
        return (query(inputs_q), *apply_layers((key, value), inputs_k))
    return query(inputs_q), key(inputs_k), value(inputs_v)


def residual_blocks(
    inputs: jax.Array,
    attend: Callable[..., jax.Array],
    mlp: Callable[..., jax.Array],
    drop: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Adds attention and then an MLP to the input, as in a pre-norm transformer layer.

    `drop` applies dropout to their results. If it is None, they add the residuals
    themselves, before rounding.
    """
    if drop is None:
        x = attend(residual=inputs)
        return mlp(x, residual=x)
    x = inputs + drop(attend())
    return x + drop(mlp(x))


def check_dropout_stream(op: str, rngs: Any, **rates: float) -> None:
    """Raises an error if dropout is enabled, but `rngs` has no stream "dropout"."""
    for name, rate in rates.items():
        checks.check_rate(op, name, rate)
        if rate > 0 and not hasattr(rngs, "dropout"):
            raise UnknownNameError(
                f'{op}: {name} = {rate} needs a PRNG stream "dropout", which rngs does '
                "not have. Pass, for example, nnx.Rngs(0, dropout=1)."
            )


class _CoreOption:
    """Descriptor that makes an option of `layer.core` an attribute of the layer."""

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, layer, owner=None):
        return self if layer is None else getattr(layer.core, self._name)

    def __set__(self, layer, value):
        layer.core = dataclasses.replace(layer.core, **{self._name: value})


class MultiHeadAttention(FixedArguments, nnx.Module):
    """Tensor-parallel attention whose QKV and output GEMMs overlap with communication.

    The parameters have the names, global shapes and initial values of
    `flax.nnx.MultiHeadAttention`, so both can load each other's checkpoints. The tokens
    are gathered once, in one AG+GEMM for queries, keys and values. The output
    projection is one GEMM+RS, which sums and scatters its result. The two calls are
    named "qkv" and "proj" in `initialize_ub`.

    Transformer Engine: `te.MultiheadAttention`.

    Attributes:
        query: column-parallel `Linear`, `[in_features, num_heads, head_dim]`.
        key: column-parallel `Linear`, `[in_kv_features, num_kv_heads, head_dim]`.
        value: column-parallel `Linear` with the shape of `key`.
        query_ln: norm of the queries over `head_dim`, `nnx.RMSNorm` or
            `nnx.LayerNorm`, or None.
        key_ln: norm of the keys over `head_dim`, or None.
        out: row-parallel `Linear`, `[num_heads, head_dim, out_features]`.
        is_causal: as in the constructor. It can be changed, as well as the following.
        rotary_base: as in the constructor.
        attention_fn: as in the constructor.
        dropout_rate: as in the constructor.
        broadcast_dropout: as in the constructor.
        deterministic: whether dropout is disabled.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    _settable = frozenset(
        ["is_causal", "rotary_base", "attention_fn", "dropout_rate"]
        + ["broadcast_dropout", "deterministic", "rngs"]
    )
    _set_elsewhere = {
        "head_dim": "Create another MultiHeadAttention with qkv_features=.",
    }
    is_causal: Any = _CoreOption()
    rotary_base: Any = _CoreOption()
    attention_fn: Any = _CoreOption()
    dropout_rate: Any = _CoreOption()
    broadcast_dropout: Any = _CoreOption()

    def __init__(  # noqa: PLR0913, flax.nnx.MultiHeadAttention's arguments
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        is_causal: bool = False,
        rotary_base: float | None = None,
        qk_norm_type: str | None = None,
        normalize_qk: bool = False,
        attention_fn: Callable[..., jax.Array] | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates the query, key, value and output projections, and optional norms.

        Args:
            num_heads: the global number of query heads.
            in_features: the number of input features.
            qkv_features: `num_heads * head_dim`; None takes `in_features`.
            out_features: the number of output features; None takes `in_features`.
            num_kv_heads: the global number of key and value heads, which must divide
                `num_heads` (grouped-query attention); None takes `num_heads`.
            in_kv_features: the number of input features of keys and values; None takes
                `in_features`.
            is_causal: whether a token attends only to itself and earlier tokens.
            rotary_base: base of the rotary embeddings of queries and keys, for example
                10000.0; None disables them.
            qk_norm_type: the norm that is applied to queries and keys before rotary
                embeddings: "RMSNorm", "LayerNorm", or None.
            normalize_qk: True has the same effect as `qk_norm_type="LayerNorm"`; Flax's
                argument.
            attention_fn: called as `attention_fn(q, k, v, mask=, is_causal=)` with
                arrays `[batch, tokens, heads, head_dim]`, and with dropout also with
                `dropout_rng=`, `dropout_rate=` and `broadcast_dropout=`. None uses
                `jax.nn.dot_product_attention`, or `nnx.dot_product_attention` with
                dropout.
            dropout_rate: the probability of dropping an attention weight.
            broadcast_dropout: whether all sequences and heads drop the same weights.
            deterministic: whether dropout is disabled; `model.eval()` sets it to True.
            rngs: the PRNG streams for the initializers; with dropout also "dropout".
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if the number of ranks does not divide the heads, the
                heads do not divide `qkv_features`, `num_kv_heads` does not divide
                `num_heads`, or `dropout_rate` is not in [0, 1).
            UnknownNameError: if the method or the axis is unknown, or `attention_fn` is
                not callable.
        """
        check_options(
            MultiHeadAttention,
            options,
            rngs=rngs,
            is_causal=is_causal,
            normalize_qk=normalize_qk,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
        )
        check_dropout_stream("MultiHeadAttention", rngs, dropout_rate=dropout_rate)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        out_features = in_features if out_features is None else out_features
        check_attention_sizes(num_heads, num_kv_heads, qkv_features, rotary_base)
        head_dim = qkv_features // num_heads
        self._store(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        layout: dict[str, Any] = {
            name: value for name, value in options.items() if name in _LAYOUT_OPTIONS
        }
        self.core = CoreAttention(
            ShardingLayout("row", **layout),
            attention_fn,
            is_causal,
            rotary_base,
            dropout_rate,
            broadcast_dropout,
        )
        self.core.check_heads(num_heads, num_kv_heads)
        heads = num_heads, head_dim
        key_sizes = in_kv_features, (num_kv_heads, head_dim)
        self.query = inner_linear(in_features, heads, "column", "qkv", rngs, options)
        self.key = inner_linear(*key_sizes, "column", "qkv", rngs, options)
        self.value = inner_linear(*key_sizes, "column", "qkv", rngs, options)
        self.query_ln: nnx.RMSNorm | nnx.LayerNorm | None = nnx.data(None)
        self.key_ln: nnx.RMSNorm | nnx.LayerNorm | None = nnx.data(None)
        norm = qk_norm_class("MultiHeadAttention", qk_norm_type, normalize_qk, nnx)
        if norm is not None:
            dtypes = norm_dtypes(options)
            self.query_ln = norm(head_dim, rngs=rngs, **dtypes)
            self.key_ln = norm(head_dim, rngs=rngs, **dtypes)
        self.out = inner_linear(heads, out_features, "row", "proj", rngs, options)
        self.deterministic = deterministic
        self.rngs: nnx.RngStream | None = nnx.data(None)
        if dropout_rate > 0:
            self.rngs = rngs.dropout.fork()

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        residual: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes attention and its output projection, and adds an optional residual.

        Maps `[..., tokens, in_features]` to `[..., tokens, out_features]`.

        Args:
            inputs_q: the inputs of the queries.
            inputs_k: the inputs of the keys; None takes `inputs_q`.
            inputs_v: the inputs of the values; None takes `inputs_k`.
            mask: `[..., heads, tokens, tokens of inputs_k]`, or broadcastable to it;
                true where a query attends to a key.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            residual: array with the shape of the result. The output projection adds it
                inside its fused call, before rounding.
            deterministic: whether dropout is disabled; None takes the module's value.

        Raises:
            UnsupportedOverlapError: if rotary embeddings are enabled and the inputs of
                queries and keys differ.
        """
        arrays = [inputs_q]
        if isinstance(self.query, Linear):  # the user may have replaced it
            arrays = [*jax.tree.leaves(parameter_value(self.query.kernel)), inputs_q]
        self.core.check_heads(self.num_heads, self.num_kv_heads, *arrays)
        layers = (self.query, self.key, self.value)
        inputs = (inputs_q, inputs_k, inputs_v)
        q, k, v = project_qkv(layers, inputs, self.rotary_base)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = apply_norm(self.query_ln, q), apply_norm(self.key_ln, k)
        key = self._dropout_key(deterministic)
        y = self.core(q, k, v, mask=mask, positions=positions, dropout_key=key)
        return apply_with_residual(self.out, y, residual)

    def _dropout_key(self, deterministic):
        """Returns the PRNG key for a call's dropout, or None if dropout is disabled."""
        op = "MultiHeadAttention"
        deterministic = self.deterministic if deterministic is None else deterministic
        arguments.check(op, deterministic=deterministic)
        if deterministic or self.dropout_rate == 0:
            return None
        if self.rngs is None:
            raise ConfigurationError(
                f"{op}: dropout_rate = {self.dropout_rate} was set on a layer that was "
                "created without dropout, so it has no PRNG stream. Set its attribute "
                "rngs, too, for example to nnx.Rngs(dropout=0).dropout.fork()."
            )
        return self.rngs()

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets whether dropout is disabled; `nnx.view` calls this method.

        Args:
            deterministic: whether dropout is disabled; None keeps the current value.
        """
        arguments.check("MultiHeadAttention", deterministic=deterministic)
        if deterministic is not None:
            self.deterministic = deterministic


class TransformerLayer(FixedArguments, nnx.Module):
    """A pre-norm transformer layer: attention and an MLP, each with a residual.

    The layer runs four overlapped GEMMs, named "qkv", "proj", "fc1" and "fc2" in
    `initialize_ub`. Between "qkv" and "proj" the activations are sharded by heads,
    between "fc1" and "fc2" by features, and everywhere else by tokens.

    Transformer Engine: `te.TransformerLayer`.

    Attributes:
        attention_norm: the norm before the attention, `nnx.LayerNorm` or `nnx.RMSNorm`.
        attention: the `MultiHeadAttention`.
        mlp: the `LayerNormMLP`, which contains the norm before the MLP.
        dropout: the `nnx.Dropout` with the rate `hidden_dropout`, or None.
    """

    _settable = frozenset()
    _set_elsewhere = {
        "is_causal": "Set attention.is_causal.",
        "rotary_base": "Set attention.rotary_base.",
        "attention_fn": "Set attention.attention_fn.",
        "activation": "Set mlp.activation.",
        "attention_dropout": "Set attention.dropout_rate.",
        "hidden_dropout": "Set dropout.rate.",
        "deterministic": "Call train() or eval().",
        "rngs": "Set attention.rngs or dropout.rngs.",
    }

    def __init__(  # noqa: PLR0913, of attention, norms and MLP
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        is_causal: bool = True,
        rotary_base: float | None = None,
        qk_norm_type: str | None = None,
        normalize_qk: bool = False,
        attention_fn: Callable[..., jax.Array] | None = None,
        activation: str | Callable[[jax.Array], jax.Array] = "gelu",
        normalization: str = "LayerNorm",
        epsilon: float = 1e-6,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        """Creates attention, MLP and norms with their parameters.

        Args:
            hidden_size: the number of input and output features.
            ffn_hidden_size: the global number of features inside the MLP.
            num_attention_heads: the global number of query heads.
            num_gqa_groups: the global number of key and value heads; None takes
                `num_attention_heads`.
            kv_channels: the number of features of a head; None takes `hidden_size /
                num_attention_heads`.
            is_causal: whether a token attends only to itself and earlier tokens.
            rotary_base: see `MultiHeadAttention`.
            qk_norm_type: see `MultiHeadAttention`.
            normalize_qk: see `MultiHeadAttention`.
            attention_fn: see `MultiHeadAttention`.
            activation: the activation function of the MLP; see `LayerNormMLP`.
            normalization: "LayerNorm" or "RMSNorm".
            epsilon: added to the variance, or to the mean square, before the root.
            hidden_dropout: the dropout rate of the results of attention and MLP. Where
                none is dropped, "proj" and "fc2" add the residuals before rounding.
            attention_dropout: the probability of dropping an attention weight.
            deterministic: whether dropout is disabled; `model.eval()` sets it to True.
            rngs: the PRNG streams for the initializers; with dropout also "dropout".
            **options: further arguments of `Linear`.

        Raises:
            ShapeContractError: if the number of ranks does not divide heads or
                features, the heads do not divide the features, the number of key heads
                does not divide the number of query heads, or a dropout rate is not in
                [0, 1).
            UnknownNameError: if an activation, norm, method or axis is unknown.
        """
        op = "TransformerLayer"
        check_options(
            TransformerLayer,
            options,
            rngs=rngs,
            is_causal=is_causal,
            normalize_qk=normalize_qk,
            deterministic=deterministic,
        )
        check_transformer_sizes(
            hidden_size, num_attention_heads, num_gqa_groups, kv_channels
        )
        qk_norm_class(op, qk_norm_type, normalize_qk, nnx)
        rates = {"hidden_dropout": hidden_dropout}
        check_dropout_stream(op, rngs, **rates, attention_dropout=attention_dropout)
        self.attention_norm = make_norm(
            nnx, op, normalization, epsilon, options, hidden_size, rngs=rngs
        )
        features = None if kv_channels is None else kv_channels * num_attention_heads
        self.attention = MultiHeadAttention(
            num_attention_heads,
            hidden_size,
            features,
            hidden_size,
            num_gqa_groups,
            is_causal=is_causal,
            rotary_base=rotary_base,
            qk_norm_type=qk_norm_type,
            normalize_qk=normalize_qk,
            attention_fn=attention_fn,
            dropout_rate=attention_dropout,
            deterministic=deterministic,
            rngs=rngs,
            **options,
        )
        self.mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            activation=activation,
            normalization=normalization,
            epsilon=epsilon,
            rngs=rngs,
            **options,
        )
        self.dropout: nnx.Dropout | None = nnx.data(None)
        if hidden_dropout > 0:
            self.dropout = nnx.Dropout(
                hidden_dropout, deterministic=deterministic, rngs=rngs
            )

    def __call__(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes attention and the MLP, and adds the input of each to its result.

        Maps `[..., tokens, hidden_size]` to the same shape.

        Args:
            inputs: the activations.
            mask: `[..., heads, tokens, tokens]`, or broadcastable to it; true where a
                token attends to another. With `is_causal`, later tokens are always
                masked.
            positions: positions of the tokens for rotary embeddings, `[..., tokens]`;
                None uses 0, 1, 2, ....
            deterministic: whether dropout is disabled; None takes the module's value.
        """
        arguments.check("TransformerLayer", deterministic=deterministic)
        attend = functools.partial(
            self.attention,
            normalize("TransformerLayer", self.attention_norm, inputs),
            mask=mask,
            positions=positions,
            deterministic=deterministic,
        )
        return residual_blocks(inputs, attend, self.mlp, self._drop(deterministic))

    def _drop(self, deterministic):
        """Returns the dropout function for hidden states, or None if it is disabled."""
        op, module = "TransformerLayer", self.dropout
        if module is None:
            return None
        deterministic = module.deterministic if deterministic is None else deterministic
        arguments.check(op, deterministic=deterministic)
        checks.check_rate(op, "dropout.rate", module.rate)
        if deterministic or module.rate == 0:
            return None
        layout = self.attention.core.sharding_layout
        return lambda y: dropout(y, module.rate, module.rngs(), layout)
