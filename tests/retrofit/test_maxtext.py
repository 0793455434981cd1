"""The program of docs/maxtext.md, with stand-ins for MaxText."""

import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import assert_trees_close, loss
from jax import P
from jax.sharding import AxisType
from operands import normal
from programs import calls, compiled_text

TOP = pathlib.Path(__file__).parents[2]


@pytest.fixture
def quantization(monkeypatch):
    """Returns the quantization that MaxText passes to its layers."""
    for name in (
        "maxtext",
        "maxtext.layers",
        "maxtext.layers.quantizations",
        "maxtext.trainers",
        "maxtext.trainers.pre_train",
        "maxtext.trainers.pre_train.train",
    ):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    quantizations = sys.modules["maxtext.layers.quantizations"]
    quantizations.Quantization = type("Quantization", (), {})
    (program,) = re.findall(
        r"```python\n(.*?)```", (TOP / "docs/maxtext.md").read_text(), re.DOTALL
    )
    exec(program, {"__name__": "guide"})
    return quantizations.configure_quantization("a configuration")


class Dense(nnx.Module):
    """Uses a quantization as DenseGeneral of MaxText does."""

    def __init__(self, shape, mesh_axes, quantization, rngs):
        self.kernel = nnx.Param(rngs.params.normal(shape) / shape[0] ** 0.5)
        self.quantized = quantization is not None
        if self.quantized:
            dot_general = quantization.dot_general_cls(mesh_axes=mesh_axes)()
            self.dot_general = nnx.bridge.ToNNX(dot_general, rngs=rngs)
            token = jnp.zeros((1, shape[0]))
            self.dot_general.lazy_init(token, self.kernel[...], dimensions(token))
            self(token)

    def __call__(self, x):
        multiply = self.dot_general if self.quantized else jax.lax.dot_general
        return multiply(x, self.kernel[...], dimensions(x), precision=None)


def dimensions(x):
    return ((x.ndim - 1,), (0,)), ((), ())


class Model(nnx.Module):
    def __init__(self, quantization):
        rngs = nnx.Rngs(0)
        self.up = Dense((16, 32), ("embed", "mlp"), quantization, rngs)
        self.down = Dense((32, 16), ("mlp", "embed"), quantization, rngs)
        self.logits = Dense((16, 24), ("embed", "vocab"), quantization, rngs)

    def __call__(self, x):
        return self.logits(x + self.down(nnx.gelu(self.up(x))))


def test_its_layers_are_overlapped(quantization):
    model, plain = Model(quantization), Model(None)
    nnx.update(model, nnx.state(plain))
    x = normal(0, (4, 8, 16))
    program = nnx.jit(nnx.value_and_grad(loss))
    axes, types = ("data", "fsdp", "tensor_sequence"), (AxisType.Auto,) * 3
    with jax.set_mesh(jax.make_mesh((1, 2, 2), axes, types)):
        placed = jax.device_put(x, P("fsdp", "tensor_sequence"))
        count = calls(compiled_text(program, model, placed))
        result = program(model, placed)
    # Forward and backward pass without the gradient of x. XLA computes the logits.
    assert count == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1, "wgrad": 2}
    assert_trees_close(result, program(plain, x), rtol=1e-4)
