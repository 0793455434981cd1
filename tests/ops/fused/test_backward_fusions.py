"""Scaled gradients, and gradients that are rounded once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from linears import arrays, dgrad, wgrad, wide
from operands import assert_close, assert_equal, normal, small_integers
from overlapped_models import model, params_of
from programs import calls, compiled_text, tp_mesh
from sequences import names

from jax_ub import ops


def backward_ops(seq):
    return names(ops.OperationFuser([seq]).backward_ops)


def both(gradients):
    """Returns the results of `gradients` with fusions, and without them."""
    found = gradients()
    with ops.without_fusions():
        return found, gradients()


@covering(mode=[None, "row"], accumulates=[True, False])
def test_backward_linear_scale_scales_within_both_gemms(accumulates, mode):
    a = arrays(4)
    options = {"accumulate_into_main_grad": accumulates}
    if mode is None:
        seq = ops.Sequential(
            ops.BasicLinear(*a.w.shape, **options), ops.ConstantScale(0.5)
        )
        layer = lambda p, x: seq((*p, {}), x)  # noqa: E731
        given = ({"kernel": a.w, "main_grad": a.main_grad},)
        if not accumulates:
            given = ({"kernel": a.w},)
    else:
        m = model(mode, 4, a, bias=False, name=None, **options)
        seq = ops.Sequential(*m.seq, ops.ConstantScale(0.5))
        layer = type(m)(m.kind, 4, seq, (*m.specs, {}), m.x, m.y).on_ranks()
        inner = layer
        layer = lambda p, x: inner((*p, {}), x)  # noqa: E731
        given = params_of(m, a, None)
    assert backward_ops(seq) == ["BackwardLinearScale"]

    def program():
        def gradient(p, x, dy):
            return jax.vjp(layer, p, x)[1](dy)

        return jax.jit(gradient)

    d_params, dx = program()(given, a.x, a.dy)
    assert_equal(dx, dgrad(a) / 2)
    if accumulates:
        assert_equal(d_params[0]["main_grad"], wide(a.main_grad) + wgrad(a) / 2)
    else:
        assert_equal(d_params[0]["kernel"], wgrad(a) / 2)
    text = compiled_text(program(), given, a.x, a.dy)
    assert not re.search(r"= f32\[\d+,\d+,\d+\]\S* multiply\(", text)
    with ops.without_fusions():
        unfused = compiled_text(program(), given, a.x, a.dy)
    assert re.search(r"= f32\[\d+,\d+,\d+\]\S* multiply\(", unfused)
    assert calls(text) == calls(unfused)


ACTIVATIONS = [ops.ReLU(), ops.SwiGLU(), *nightly(ops.GELU(), ops.SiLU(), ops.GEGLU())]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_backward_activation_bias_sums_before_rounding(activation):
    x, dy = normal(0, (3, 40, 16), "bfloat16"), normal(1, (3, 40, 16), "bfloat16")
    dy = dy[..., : activation.function(jnp.ones(16)).shape[0]]
    bias = normal(2, (16,))
    seq = ops.Sequential(ops.Bias(16), activation)
    assert backward_ops(seq) == ["BackwardActivationBias"]

    def gradients():
        def gradient(bias, x, dy):
            layer = lambda b, x: seq(({"bias": b}, {}), x)  # noqa: E731
            return jax.vjp(layer, bias, x)[1](dy)

        return jax.jit(gradient)(bias, x, dy)

    (db, dx), (unfused_db, unfused_dx) = both(gradients)
    # XLA may keep more than bf16's precision in one of the programs.
    found, expected = (np.asarray(v, np.float32) for v in (dx, unfused_dx))
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=1e-5)

    def plain(x):
        z = (x.astype("float32") + bias).astype("bfloat16").astype("float32")
        _, transposed = jax.vjp(activation.function, z)
        return transposed(dy.astype("float32"))[0].sum((0, 1))

    exact = plain(x)
    error, unfused = (np.max(np.abs(v - exact)) for v in (db, unfused_db))
    assert error < 1e-5 * np.max(np.abs(exact)) + 1e-4
    # The derivative of ReLU is 0 or 1, so nothing is rounded.
    assert error <= unfused


def test_backward_add_rmsnorm_rounds_once():
    k = 24
    x, dy = normal(0, (2, 5, k), "bfloat16"), normal(1, (2, 5, k), "bfloat16")
    extra = normal(2, (2, 5, k), "bfloat16")
    scale = normal(3, (k,))
    seq = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(k))
    assert backward_ops(seq) == ["BackwardAddRMSNorm"]

    def gradients(x=x, cast=lambda v: v):
        def gradient(scale, x):
            layer = lambda s, x: seq(({}, {"scale": s}), x)  # noqa: E731
            return jax.vjp(layer, scale, x)[1]((cast(dy), cast(extra)))

        return jax.jit(gradient)(scale, x)

    (d_scale, dx), (unfused_d_scale, unfused_dx) = both(gradients)
    assert_equal(d_scale, unfused_d_scale)
    widened = lambda v: v.astype("float32")  # noqa: E731
    _, exact = gradients(widened(x), widened)
    error = np.max(np.abs(wide(dx) - exact))
    assert error <= np.max(np.abs(wide(unfused_dx) - exact))
    assert_equal(dx, exact.astype("bfloat16"))


def test_backward_add_rmsnorm_with_a_replicated_input():
    """Each rank has different scales, so dx is the sum over the ranks."""
    seq = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(6))
    x, scales, dy = normal(0, (8, 6)), normal(1, (12,)), normal(2, (16, 6))

    def gradient():
        layer = lambda scale, x: seq(({}, {"scale": scale}), x)  # noqa: E731
        specs = (P("tp"), P())
        run = jax.shard_map(layer, mesh=tp_mesh(2), in_specs=specs, out_specs=specs)
        return jax.jit(lambda x: jax.vjp(run, scales, x)[1]((dy, x))[1])(x)

    dx, unfused = both(gradient)
    assert_close(dx, unfused, 6)


def test_backward_add_rmsnorm_reads_the_gradient_once():
    k = 24
    x = normal(0, (2, 5, k))
    seq = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(k))

    def gradient(x, dy, extra):
        layer = lambda x: seq(({}, {"scale": jnp.ones(k)}), x)  # noqa: E731
        return jax.vjp(layer, x)[1]((dy, extra))

    text = compiled_text(jax.jit(gradient), x, x, x)
    body = text[text.index("ENTRY") :].splitlines()
    written = [line for line in body if "= f32[2,5,24]" in line]
    assert len([line for line in written if " parameter(" not in line]) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_backward_fusions_without_a_gradient_of_the_extra_output(in_place):
    x, dy = small_integers(0, (2, 6)), small_integers(1, (2, 6))
    seq = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), ops.RMSNorm(6))

    def gradients():
        def loss(x):
            return jnp.sum(seq(({}, {"scale": jnp.ones(6)}), x)[0] * dy)

        return jax.jit(jax.grad(loss))(x)

    found, expected = both(gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
