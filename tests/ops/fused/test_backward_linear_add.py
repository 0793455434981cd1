"""dgrad GEMMs that add to the gradient of a residual, alone and overlapped."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from linears import Arrays, arrays, dgrad, wgrad, wide
from operands import assert_close, assert_equal, normal, small_integers
from overlapped_models import model, params_of
from programs import calls, compiled_text, copies, own_copy, tp_mesh
from scaled_operands import DEFAULT_RECIPES
from sequences import FEATURES, names

from jax_ub import ops

# Linears after the extra output: mode, and the name of the overlap.
KINDS = {
    "local": (None, None),
    "row": ("row", None),
    "overlapped row": ("row", "proj"),
    "overlapped scatter": ("scattered", "proj"),
}


def residual_layer(kind, num_ranks, a, *, in_place=True, **options):
    """Returns x -> (linear(x), x), in a `shard_map` if the linear is parallel."""
    mode, name = KINDS[kind]
    make = ops.MakeExtraOutput(in_place=in_place)
    if mode is None:
        seq = ops.Sequential(make, ops.BasicLinear(*a.w.shape, **options))
        return seq, lambda p, x: seq(({}, *p), x)
    m = model(mode, num_ranks, a, bias=False, name=name, **options)
    seq = ops.Sequential(make, *m.seq)
    layer = jax.shard_map(
        lambda p, x: seq(({}, *p), x),
        mesh=tp_mesh(num_ranks),
        in_specs=(m.specs, m.x),
        out_specs=(m.y, m.x),
    )
    return seq, layer


def params(kind, num_ranks, a):
    mode = KINDS[kind][0]
    if mode is None:
        return ({"kernel": a.w},)
    return params_of(model(mode, num_ranks, a, bias=False), a, None)


def step_of(layer, a, *, with_extra=True):
    def loss(params, x):
        y, extra = layer(params, x)
        total = jnp.sum(y.astype("float32") * a.dy.astype("float32"))
        if with_extra:
            total += jnp.sum(extra.astype("float32") * a.residual.astype("float32"))
        return total

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


CASES = [
    ("local", "float32", True),
    ("local", "bfloat16", True),
    ("local", "float16", False),
    ("row", "bfloat16", True),
    ("overlapped row", "float32", True),
    ("overlapped row", "float16", True),
    ("overlapped row", "bfloat16", False),
    ("overlapped scatter", "bfloat16", True),
]


@pytest.mark.parametrize(("kind", "dtype", "with_extra"), CASES)
def test_sum_is_exact(kind, dtype, with_extra):
    a = arrays(4, dtype)
    seq, layer = residual_layer(kind, 4, a)
    assert names(ops.OperationFuser([seq]).backward_ops) == ["BackwardLinearAdd"]
    step = step_of(layer, a, with_extra=with_extra)
    _, (d_params, dx) = step(params(kind, 4, a), a.x)
    residual = wide(a.residual) * with_extra
    assert_equal(dx, (dgrad(a) + residual).astype(dtype))
    assert_equal(d_params[0]["kernel"], wgrad(a).astype(dtype))


@covering(kind=KINDS, name=["row", "current"])
def test_sum_with_an_fp8_gradient_is_rounded_once(kind, name):
    # The gradients of x are sums of 257 ones, which is halfway between bf16 numbers.
    x, w, dy = (
        jnp.ones(shape, "bfloat16") for shape in ((1, 8, 8), (8, 257), (1, 8, 257))
    )
    a = Arrays(x, w, dy, None, x)
    _, layer = residual_layer(kind, 2, a, fp8=DEFAULT_RECIPES[name])
    _, (_, dx) = step_of(layer, a)(params(kind, 2, a), a.x)
    assert_equal(dx, jnp.full_like(x, 258))


@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_close_on_normal_values(kind):
    a = arrays(4, "bfloat16", normal)
    _, (_, dx) = step_of(residual_layer(kind, 4, a)[1], a)(params(kind, 4, a), a.x)
    assert_close(dx, dgrad(a) + wide(a.residual), a.w.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gemm_adds_the_residual(kind):
    a = arrays(4)

    def program(in_place):
        layer = residual_layer(kind, 4, a, in_place=in_place)[1]
        given = params(kind, 4, a)

        def gradient(x, dy, residual):
            _, transposed = jax.vjp(lambda x: layer(given, x), x)
            return transposed((dy, residual))

        return compiled_text(jax.jit(gradient), a.x, a.dy, a.residual)

    assert num_adds(program(in_place=True)) == 0
    assert num_adds(program(in_place=False)) == 1
    assert calls(program(True)) == calls(program(False))


def num_adds(text):
    """Counts the additions of arrays in HLO text, except those of index scalars."""
    return len(re.findall(r"= f32\[\d+,\d+,\d+\]\S* add\(", text))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_reuses_the_buffer_of_the_residual_gradient(kind):
    a = arrays(4)
    mode = KINDS[kind][0]
    layer, given = residual_layer(kind, 4, a)[1], params(kind, 4, a)
    x, dy, residual = a.x, a.dy, jnp.array(a.residual)
    if mode is not None:
        x, residual = own_copy((x, residual), tp_mesh(4), FEATURES)
        dy = own_copy(dy, tp_mesh(4), P(None, "tp"))
    step = jax.jit(
        lambda x, dy, r: jax.vjp(lambda x: layer(given, x), x)[1]((dy, r)),
        donate_argnums=2,
    )
    shape = residual.addressable_shards[0].data.shape
    text = compiled_text(step, x, dy, residual)
    assert copies(text, f"f32[{','.join(map(str, shape))}]") == 0
    pointers = [s.data.unsafe_buffer_pointer() for s in residual.addressable_shards]
    (dx,) = step(x, dy, residual)
    assert_equal(dx, dgrad(a) + wide(a.residual))
    assert pointers == [s.data.unsafe_buffer_pointer() for s in dx.addressable_shards]


@pytest.mark.parametrize("donate", [(), (2,)])
@pytest.mark.parametrize("mode", [None, "row"])
def test_a_gradient_used_twice_is_copied_first(mode, donate):
    """y = x + linear(x): dy is the residual's gradient, and a factor of dx and dw.

    For y = x + linear(x), dy is both the residual's gradient and an operand of the
    GEMMs for dx and dw. Transformer Engine accumulates into the array that it still has
    to read.
    """
    # Without sequence parallelism a row-parallel result can have the shape of x.
    num_ranks, k = 2, 12
    x, dy = small_integers(0, (2, 5, k)), small_integers(2, (2, 5, k))
    w = small_integers(1, (k if mode is None else num_ranks * k, k))
    linear = ops.BasicLinear(*w.shape, tensor_parallel_mode=mode)
    seq = ops.Sequential(
        ops.MakeExtraOutput(in_place=True).with_extra_output_channel(0, "skip", False),
        linear,
        ops.AddExtraInput(in_place=True).with_extra_input_channel(0, "skip"),
    )
    backward_ops = names(ops.OperationFuser([seq]).backward_ops)
    assert backward_ops == ["BackwardLinearAdd", "AddExtraInput"]

    def gradients(w, x, dy):
        return jax.vjp(lambda w, x: seq(({}, {"kernel": w}, {}), x), w, x)[1](dy)

    if mode is not None:
        gradients = jax.shard_map(
            gradients,
            mesh=tp_mesh(num_ranks),
            in_specs=(P("tp"), P(), P()),
            out_specs=(P("tp"), P("tp")),
            check_vma=False,
        )
    step = jax.jit(gradients, donate_argnums=donate)
    dw, dx = step(w, x, dy + 0)
    # With check_vma=False the gradient of a replicated value is the sum of the ranks'
    # gradients.
    x, dy, w = wide(x), wide(dy), wide(w).reshape(-1, k, k)
    summed = dy * len(w)
    assert_equal(dx, np.concatenate([dy + summed @ part.T for part in w]))
    part = x.reshape(-1, k).T @ summed.reshape(-1, k)
    assert_equal(dw, np.concatenate([part] * len(w)))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_operands_cost_no_gemm(kind):
    a = arrays(4)
    layer, given = residual_layer(kind, 4, a)[1], params(kind, 4, a)

    def loss(p, x):
        y, extra = layer(p, x)
        return jnp.sum(y * a.dy) + jnp.sum(extra * a.residual)

    of_x = jax.jit(jax.value_and_grad(lambda x: loss(given, x)))
    assert "wgrad" not in calls(compiled_text(of_x, a.x))
    assert_equal(of_x(a.x)[1], dgrad(a) + wide(a.residual))
    of_w = jax.jit(jax.value_and_grad(lambda p: loss(p, a.x)))
    found = calls(compiled_text(of_w, given))
    assert found["wgrad"] == 1
    assert found["matmul"] + found["all_gather_matmul"] <= 1
    assert_equal(of_w(given)[1][0]["kernel"], wgrad(a))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_extra_output_has_a_gradient(kind):
    a = arrays(4)
    layer, given = residual_layer(kind, 4, a)[1], params(kind, 4, a)

    def loss(p, x):
        return jnp.sum(layer(p, x)[1] * a.residual)

    d_params, dx = jax.jit(jax.grad(loss, (0, 1)))(given, a.x)
    assert_equal(dx, a.residual)
    assert_equal(d_params[0]["kernel"], np.zeros(a.w.shape, "float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_gradient_is_added_to_main_grad(kind):
    a = arrays(4)
    layer = residual_layer(kind, 4, a, accumulate_into_main_grad=True)[1]
    first, *rest = params(kind, 4, a)
    given = ({**first, "main_grad": a.main_grad}, *rest)
    _, (d_params, dx) = step_of(layer, a)(given, a.x)
    assert_equal(d_params[0]["main_grad"], wide(a.main_grad) + wgrad(a))
    assert_equal(dx, dgrad(a) + wide(a.residual))


def test_dx_has_the_dtype_of_the_residual_gradient():
    a = arrays(1, make=normal)
    seq = ops.Sequential(
        ops.MakeExtraOutput(in_place=True),
        ops.BasicLinear(*a.w.shape, dtype="bfloat16"),
    )

    def loss(x):
        y, extra = seq(({}, {"kernel": a.w}), x)
        return jnp.sum(y.astype("float32") * a.dy) + jnp.sum(extra * a.residual)

    def gradient():
        return jax.jit(jax.grad(loss))(a.x)

    dx = gradient()
    with ops.without_fusions():
        unfused = gradient()
    dy, w = (wide(array.astype("bfloat16")) for array in (a.dy, a.w))
    exact = dy @ w.T + wide(a.residual)
    assert dx.dtype == unfused.dtype == "float32"
    # The product is not rounded to bf16 before it is added.
    assert np.max(np.abs(dx - exact)) < 1e-5 < np.max(np.abs(unfused - exact))


@pytest.mark.parametrize("overlapped", [False, True])
def test_residual_gradient_of_a_replicated_input_is_added_once(overlapped):
    """Each rank has a different kernel, so the gradients of the shared x are summed."""
    options = {"userbuffers_options": {"comm_name": "proj"}} if overlapped else {}
    make = ops.MakeExtraOutput(in_place=True)
    seq = ops.Sequential(make, ops.BasicLinear(6, 4, **options), ops.ReduceScatter())
    assert "BackwardLinearAdd" in names(ops.OperationFuser(seq).backward_ops)
    ws, x = small_integers(0, (12, 4)), small_integers(1, (8, 6))
    cotangents = small_integers(2, (8, 4)), small_integers(3, (8, 6))

    @jax.jit
    def gradients(ws, x):
        layer = lambda w, x: seq(({}, {"kernel": w}, {}), x)  # noqa: E731
        specs = (P("tp"), P())
        run = jax.shard_map(layer, mesh=tp_mesh(2), in_specs=specs, out_specs=specs)
        return jax.vjp(run, ws, x)[1](cotangents)

    plain = lambda ws, x: (x @ ws[:6] + x @ ws[6:], x)  # noqa: E731
    assert_equal(gradients(ws, x), jax.vjp(plain, ws, x)[1](cotangents))
