"""Ops without a layer: `dgrad_add`, `wgrad_accumulate`, bad input of `all_reduce`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import devices
from operands import DTYPES, assert_equal, small_integers
from programs import calls, compiled_text, copies, dp_tp_mesh
from refusals import refuses, zeros

import jax_ub as ub
from jax_ub import ops
from jax_ub.errors import ShapeContractError, UnsupportedOverlapError


def dgrad_operands(dtype="float32", rows=(2, 5)):
    dy = small_integers(0, (*rows, 7), dtype)
    return dy, small_integers(1, (9, 7), dtype), small_integers(2, (*rows, 9), dtype)


def plain_dgrad_add(dy, w, residual):
    return dy @ w.T + residual


def wgrad_operands(dtype="float32", rows=(2, 5)):
    x, dy = small_integers(0, (*rows, 7), dtype), small_integers(1, (*rows, 9), dtype)
    return x, dy, small_integers(2, (7, 9))


def plain_wgrad_accumulate(x, dy, main_grad):
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return main_grad + x.T.astype("float32") @ dy.astype("float32")


OPS = {
    "matmul": (ub.dgrad_add, plain_dgrad_add, dgrad_operands),
    "wgrad": (ub.wgrad_accumulate, plain_wgrad_accumulate, wgrad_operands),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dgrad_add_is_exact_on_small_integers(dtype):
    dy, w, residual = dgrad_operands(dtype)
    wide = residual.astype("float32")
    expected = plain_dgrad_add(dy.astype("float32"), w.astype("float32"), wide)
    assert_equal(jax.jit(ub.dgrad_add)(dy, w, residual), expected.astype(dtype))
    assert_equal(jax.jit(ub.dgrad_add)(dy, w, wide), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wgrad_accumulate_is_exact_on_small_integers(dtype):
    values = wgrad_operands(dtype)
    expected = plain_wgrad_accumulate(*values)
    assert_equal(jax.jit(ub.wgrad_accumulate)(*values), expected)


@pytest.mark.parametrize("call", OPS)
@pytest.mark.parametrize("rows", [(), (3,), (1, 2, 3)])
def test_takes_any_batch_axes(call, rows):
    op, plain, operands = OPS[call]
    values = operands(rows=rows)
    assert_equal(op(*values), plain(*values))


@pytest.mark.parametrize("call", OPS)
def test_is_accumulated_in_place_where_the_buffer_is_free(call):
    op, plain, operands = OPS[call]
    values = tuple(map(jnp.array, operands()))
    step = jax.jit(op, donate_argnums=2)
    text = compiled_text(step, *values)
    assert calls(text) == {call: 1}
    shape = ",".join(map(str, values[2].shape))
    assert copies(text, f"f32[{shape}]") == 0
    expected = plain(*values)
    pointer = values[2].unsafe_buffer_pointer()
    result = step(*values)
    assert result.unsafe_buffer_pointer() == pointer
    assert_equal(result, expected)


def test_residual_that_is_needed_elsewhere_is_copied_and_right():
    values = dgrad_operands()
    step = jax.jit(lambda *v: (ub.dgrad_add(*v), v[2] + 1))
    assert_equal(step(*values), (plain_dgrad_add(*values), values[2] + 1))


@pytest.mark.parametrize("call", OPS)
def test_gradients_are_those_of_the_reference(call):
    op, plain, operands = OPS[call]
    values = operands()
    y, pull = jax.vjp(op, *values)
    assert_equal(pull(y), jax.vjp(plain, *values)[1](y))


def test_the_contract_of_dgrad_add_is_checked():
    dy, w, residual = dgrad_operands()
    error = ShapeContractError
    with pytest.raises(error, match="dgrad_add: dy .* has N = 7, but w .* has N = 9"):
        ub.dgrad_add(dy, w.T, residual)
    with pytest.raises(error, match="dgrad_add: residual has shape .2, 5, 7., but"):
        ub.dgrad_add(dy, w, dy)
    with pytest.raises(error, match="dgrad_add: residual is int32"):
        ub.dgrad_add(dy, w, residual.astype(jnp.int32))


def test_the_contract_of_wgrad_accumulate_is_checked():
    x, dy, main_grad = wgrad_operands()
    error = ShapeContractError
    with pytest.raises(error, match="wgrad_accumulate: dy has shape .2, 4, 9., but"):
        ub.wgrad_accumulate(x, dy[:, :4], main_grad)
    with pytest.raises(
        error, match="wgrad_accumulate: main_grad has shape .9, 7., but"
    ):
        ub.wgrad_accumulate(x, dy, main_grad.T)
    with pytest.raises(error, match="wgrad_accumulate: x is float32 and dy is float16"):
        ub.wgrad_accumulate(x, dy.astype("float16"), main_grad)
    with pytest.raises(error, match=r"x has shape \(0, 5, 7\), which is empty"):
        ub.wgrad_accumulate(x[:0], dy[:0], main_grad)
    with pytest.raises(error, match=r"x has shape \(\), but the op takes \[..., feat"):
        ub.wgrad_accumulate(jnp.ones(()), dy, main_grad)


def sequential(x, w, bias):
    return ops.Sequential(ops.Linear(6, 4))(({"kernel": w, "bias": bias},), x)


ON_ONE_DEVICE = {
    "linear": (ub.linear, ((8, 6), (6, 4), (4,))),
    "ops": (sequential, ((8, 6), (6, 4), (4,))),
    "dgrad_add": (ub.dgrad_add, ((8, 4), (6, 4), (8, 6))),
    "wgrad_accumulate": (ub.wgrad_accumulate, ((8, 6), (8, 4), (6, 4))),
}


def types_on(devices, values):
    """Returns the types of values that are sharded on an explicit mesh of devices."""
    mesh = jax.make_mesh((len(devices),), ("tp",), devices=devices)
    sharding = NamedSharding(mesh, P("tp"))
    return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for v in values]


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_operands_may_be_sharded_on_an_explicit_mesh_of_one_device(name):
    function, shapes = ON_ONE_DEVICE[name]
    values = [small_integers(i, shape) for i, shape in enumerate(shapes)]
    step = jax.jit(jax.value_and_grad(lambda *v: function(*v).sum(), (0, 1, 2)))
    types = types_on(jax.local_devices()[:1], values)
    placed = (jax.device_put(v, t.sharding) for v, t in zip(values, types, strict=True))
    found = step(*placed)
    assert_equal(found, step(*values))
    for gradient in found[1]:
        assert jax.typeof(gradient).sharding.spec[0] == "tp"
    with pytest.raises(UnsupportedOverlapError, match="runs on 2 devices, but"):
        step.trace(*types_on(devices(2), values))


def test_results_on_an_explicit_mesh_of_one_device_have_the_types_of_jax():
    mesh = jax.make_mesh((1,), ("tp",), devices=jax.local_devices()[:1])
    w = jnp.ones((6, 6))
    block = ops.Sequential(ops.Linear(6, 6), ops.GELU())
    params = block.init(jax.random.key(0))
    bodies = {
        "x @ w": lambda h: h @ w,
        "linear": lambda h: ub.linear(h, w),
        "dgrad_add": lambda h: ub.dgrad_add(h, w, h),
        "wgrad_accumulate": lambda h: ub.wgrad_accumulate(w[:4], h[:4], h),
        "Sequential": lambda h: block(params, h),
    }
    with jax.set_mesh(mesh):
        h = jax.device_put(jnp.ones((6, 6)), NamedSharding(mesh, P("tp")))
        columns = jax.device_put(w, NamedSharding(mesh, P(None, "tp")))
        for name, body in bodies.items():
            # A scan rejects a carry whose type changes.
            last, _ = jax.lax.scan(lambda h, _, body=body: (body(h), None), h, None, 2)
            assert jax.typeof(last) == jax.typeof(h), name
        assert jax.typeof(ub.linear(w, columns)) == jax.typeof(w @ columns)
        # An axis that shards rows and features shards the rows of the result.
        assert jax.typeof(ub.linear(h, columns)) == jax.typeof(h)


def test_without_a_method_the_environment_selects_plain_jax(monkeypatch):
    mesh = dp_tp_mesh(2, 2)
    specs = {"mesh": mesh, "in_specs": P("tp"), "out_specs": P(), "axis_names": {"tp"}}
    reduce = functools.partial(ub.all_reduce, axis_name="tp")
    x = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, P("tp")))

    def on_several_devices(name):
        # New functions, since JAX caches the traces of known ones.
        functions = {
            "dgrad_add": lambda x: ub.dgrad_add(x, jnp.ones((4, 6)), zeros(8, 4)),
            "wgrad_accumulate": lambda x: ub.wgrad_accumulate(x, x, zeros(6, 6)),
            "all_reduce": jax.shard_map(reduce, **specs),
        }
        return jax.jit(functions[name])(x)

    expected = {"dgrad_add": 6, "wgrad_accumulate": 8, "all_reduce": 2}
    for name in expected:
        with pytest.raises(UnsupportedOverlapError, match=f"{name}: .* set JAX_UB_MET"):
            on_several_devices(name)
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    for name, value in expected.items():
        assert np.unique(on_several_devices(name)) == [value]


def test_wgrad_accumulate_in_plain_jax_sums_rows_that_an_explicit_mesh_shards(
    monkeypatch,
):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    x, dy, main_grad = wgrad_operands()
    x, dy = (jnp.concatenate([value] * 2) for value in (x, dy))  # [4, 5, ...]
    expected = plain_wgrad_accumulate(x, dy, main_grad)
    with jax.set_mesh(jax.make_mesh((4,), ("dp",), devices=devices(4))):
        x, dy = (jax.device_put(value, P("dp")) for value in (x, dy))
        found = jax.jit(lambda *operands: ub.wgrad_accumulate(*operands))(
            x, dy, main_grad
        )
    assert_equal(found, expected)


def test_integers_are_not_reduced():
    refuses(
        ShapeContractError,
        "all_reduce: x is int32",
        lambda x: ub.all_reduce(x, axis_name="tp"),
        zeros(8, dtype="int32"),
    )


@pytest.mark.parametrize(
    ("addends", "text"),
    [
        ({"bias": zeros(3)}, r"bias has shape \(3,\), but here it is \[N\], \(4,\)"),
        (
            {"residual": zeros(4)},
            r"residual has shape \(4,\), but here it is the result",
        ),
        ({"bias": zeros(4, dtype="int32")}, "bias is int32"),
        ({"residual": zeros(8, 4, dtype="float8_e5m2")}, "residual is float8_e5m2"),
    ],
)
def test_addends_of_an_all_reduce_that_do_not_fit_are_named(addends, text):
    refuses(
        ShapeContractError,
        f"all_reduce: {text}",
        lambda x: ub.all_reduce(x, axis_name="tp", **addends),
        zeros(8, 4),
    )


def test_a_scalar_has_no_bias():
    # jax.vmap would make it a vector, but not its bias.
    refuses(
        ShapeContractError,
        r"all_reduce: x .*\(\)",
        lambda x: ub.all_reduce(x[0, 0], axis_name="tp", bias=zeros(8)[0]),
        zeros(8, 4),
    )


def test_fp8_is_not_all_reduced():
    call = functools.partial(ub.all_reduce, axis_name="tp")
    refuses(
        ShapeContractError,
        "all_reduce: x is float8_e4m3fn",
        call,
        zeros(8, dtype="float8_e4m3fn"),
    )
    refuses(
        ShapeContractError,
        "all_reduce: x is of type ScaledArray",
        lambda x: call(ub.quantize(x, ub.fp8.Float8CurrentScaling())),
        zeros(8, 4),
    )
