"""A decoder-only transformer over bytes, as one device of the mesh runs it.

Between the layers, activations are sharded over tokens, x [B, S/P, D] (sequence
parallel). A column linear gathers the tokens and shards the features; a row linear
takes sharded features and scatters the tokens again. In between, each device has its
own attention heads or its own part of the MLP. Each linear is one call that overlaps
the GEMM with its communication, forward and backward.

Outside `jax.shard_map`, parameters have their global shapes, and their `spec` is the
sharding. Inside, a module has its device's shard.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jax_ub as ub
from jax_ub.flax import OverwriteWithGradient

VOCABULARY = 256  # the values of a byte
Recipe = (
    ub.fp8.DelayedScaling
    | ub.fp8.Float8CurrentScaling
    | ub.fp8.MXFP8BlockScaling
    | ub.fp8.RowwiseScaling
)
QUERY_BLOCKS = 4  # number of blocks of queries in attention


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model. A checkpoint can only be restored with equal sizes."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


class Kernel(nnx.Param):
    """The kernel [in, out] of a linear layer.

    When the model is called, its value is a pair (kernel, main_grad). main_grad, f32
    [in, out], is the sum of the gradients of earlier microbatches. Its cotangent is the
    new sum, which the wgrad GEMM writes in place.
    """


def kernel(size_in: int, size_out: int, spec: PartitionSpec, rngs: nnx.Rngs) -> Kernel:
    """Initializes a kernel that preserves the variance of its input."""
    init = nnx.initializers.normal(size_in**-0.5)
    return Kernel(init(rngs.params(), (size_in, size_out)), spec=spec)


class Fp8(nnx.Module):
    """The FP8 recipe of a linear layer, and the recipe's state.

    Delayed scaling has a state, whose gradient is its new value. Other recipes have
    none.
    """

    def __init__(self, recipe: Recipe | None):
        """Initializes the state, which is replicated."""
        self.recipe = recipe
        state = {} if recipe is None else ub.fp8.init_state(recipe)
        self.state = nnx.Dict(
            {
                name: OverwriteWithGradient(array, spec=PartitionSpec())
                for name, array in state.items()
            }
        )

    def arguments(self) -> dict:
        """Returns the layer's arguments of functions of jax_ub."""
        state = {name: variable[...] for name, variable in self.state.items()}
        return {"fp8": self.recipe, "fp8_state": state or None}


class ColumnLinear(nnx.Module):
    """Gathers the tokens and multiplies by kernels sharded over output features."""

    def __init__(
        self,
        size_in: int,
        *sizes_out: int,
        method: str,
        rngs: nnx.Rngs,
        fp8: Recipe | None = None,
    ):
        """Initializes the kernels.

        Args:
            size_in: number of features of x.
            sizes_out: number of output features of each kernel; all share one gather.
            method: how GEMM and communication are combined (`method` of jax_ub).
            rngs: random streams for the initial kernels.
            fp8: FP8 recipe of x and the kernels; None multiplies them in their dtype.
        """
        self.method, self.fp8 = method, Fp8(fp8)
        spec = PartitionSpec(None, "tp")
        self.kernels = nnx.List([kernel(size_in, n, spec, rngs) for n in sizes_out])

    def __call__(self, x: jax.Array, out_dtype=None) -> tuple[jax.Array, ...]:
        """Computes y_i [B, S, size_out/P] from x [B, S/P, size_in]."""
        kernels, main_grads = zip(*(k.get_value() for k in self.kernels), strict=True)
        return ub.all_gather_matmul(
            x,
            kernels,
            main_grad=main_grads,
            axis_name="tp",
            method=self.method,
            out_dtype=out_dtype,
            **self.fp8.arguments(),
        )


class RowLinear(nnx.Module):
    """Multiplies by a kernel sharded over input features, and scatters the tokens."""

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        method: str,
        rngs: nnx.Rngs,
        fp8: Recipe | None = None,
    ):
        """Initializes the kernel; see `ColumnLinear` for the arguments."""
        self.method, self.fp8 = method, Fp8(fp8)
        self.kernel = kernel(size_in, size_out, PartitionSpec("tp", None), rngs)

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Computes y [B, S/P, size_out] from x [B, S, size_in/P], plus `residual`."""
        w, main_grad = self.kernel.get_value()
        return ub.matmul_reduce_scatter(
            x,
            w,
            main_grad=main_grad,
            residual=residual,
            axis_name="tp",
            method=self.method,
            **self.fp8.arguments(),
        )


class RMSNorm(nnx.Module):
    """Divides each token by its root mean square, in f32."""

    def __init__(self, size: int):
        """Initializes the scale of `size` features with ones."""
        self.scale = nnx.Param(jnp.ones(size), spec=PartitionSpec())

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [..., size]."""
        y = x.astype(jnp.float32)
        y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return (y * self.scale[...]).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Applies rotary position embedding (RoPE).

    Args:
        x: queries or keys [B, S, heads, head size].
    """
    _, num_tokens, _, head_size = x.shape
    # Computed by numpy, so that sines and cosines are constants of the program.
    speeds = 10_000.0 ** -np.linspace(0.0, 1.0, head_size // 2, endpoint=False)
    angles = np.arange(num_tokens)[:, None, None] * speeds
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes causal attention in f32, the fastest dtype in XLA:CPU.

    Each block of queries is only multiplied by keys up to its last token.

    Args:
        q: queries [B, S, heads, head size].
        k: keys of the same shape.
        v: values of the same shape.

    Returns:
        The result [B, S, heads * head size] in the dtype of `q`.
    """
    dtype, (_, num_tokens, _, head_size) = q.dtype, q.shape
    q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
    q, k = rotate(q) * head_size**-0.5, rotate(k)
    q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
    outputs = []
    size = -(-num_tokens // QUERY_BLOCKS)
    for first in range(0, num_tokens, size):
        end = min(first + size, num_tokens)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q[:, :, first:end], k[:, :, :end])
        seen = np.tri(end - first, end, first, dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        outputs.append(jnp.einsum("bhqk,bhkd->bhqd", weights, v[:, :, :end]))
    y = jnp.concatenate(outputs, axis=2).swapaxes(1, 2)
    return y.reshape(*y.shape[:2], -1).astype(dtype)


class Block(nnx.Module):
    """Attention and a SwiGLU MLP, each with a norm and a residual connection."""

    def __init__(
        self, sizes: Sizes, *, method: str, rngs: nnx.Rngs, fp8: Recipe | None
    ):
        """Initializes the linear layers and norms."""
        d, ff = sizes.d_model, sizes.d_ff
        options = {"method": method, "rngs": rngs, "fp8": fp8}
        self.head_size = d // sizes.num_heads
        self.attention_norm = RMSNorm(d)
        self.qkv = ColumnLinear(d, d, d, d, **options)
        self.attention_out = RowLinear(d, d, **options)
        self.mlp_norm = RMSNorm(d)
        self.gate_up = ColumnLinear(d, ff, ff, **options)
        self.down = RowLinear(ff, d, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes the block's output [B, S/P, D] from x of the same shape."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_size) for y in qkv)
        x = self.attention_out(attend(q, k, v), residual=x)
        gate, up = self.gate_up(self.mlp_norm(x))
        return self.down(nnx.silu(gate) * up, residual=x)


class LanguageModel(nnx.Module):
    """A language model that maps bytes to logits of the next byte."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        dtype: jnp.dtype,
        method: str,
        rngs: nnx.Rngs,
        fp8: Recipe | None = None,
    ):
        """Initializes f32 parameters; the model computes in `dtype`.

        The linear layers of the blocks multiply FP8 by the recipe `fp8`. The head,
        which computes the logits, does not.
        """
        d = sizes.d_model
        self.dtype = dtype
        table = nnx.initializers.normal(1.0)(rngs.params(), (VOCABULARY, d))
        self.embedding = nnx.Param(table, spec=PartitionSpec())
        blocks = [
            Block(sizes, method=method, rngs=rngs, fp8=fp8)
            for _ in range(sizes.num_layers)
        ]
        self.blocks = nnx.List(blocks)
        self.norm = RMSNorm(d)
        self.head = ColumnLinear(d, VOCABULARY, method=method, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes f32 logits [B, S, vocabulary/P] from a device's tokens [B, S/P]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens [B, S/P] in the embedding, which is replicated."""
        return self.embedding[...][tokens].astype(self.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Multiplies by the head, which returns f32 [B, S, vocabulary/P]."""
        (logits,) = self.head(x, out_dtype=jnp.float32)
        return logits
