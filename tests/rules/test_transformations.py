"""Every way that JAX transforms, compiles and stores overlapped calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import nightly
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import devices
from operands import assert_equal, small_integers
from programs import by_method, calls, compiled_text, dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub

ROWS, COLUMNS, FEATURES = P("tp"), P(None, "tp"), P(None, "tp")
PAIR = (ROWS, COLUMNS, P("tp"))
STACKED = (P(None, "tp"), COLUMNS, P("tp"))


def column(x, w, **options):
    return ub.all_gather_matmul(x, w, axis_name="tp", **options)


def row(x, w, **options):
    return ub.matmul_reduce_scatter(x, w, axis_name="tp", **options)


def pair(x, w1, w2):
    return row(column(x, w1), w2)


def operands():
    return tuple(
        small_integers(i, shape) for i, shape in enumerate([(8, 6), (6, 12), (12, 6)])
    )


def place(values):
    return jax.device_put(
        values, tuple(NamedSharding(tp_mesh(4), spec) for spec in PAIR)
    )


def plain(x, w1, w2):
    return x @ w1 @ w2


def on_four(function, out_specs=ROWS, in_specs=PAIR):
    return on_ranks(function, tp_mesh(4), in_specs, out_specs)


def test_runs_without_jit():
    run = jax.shard_map(pair, mesh=tp_mesh(4), in_specs=PAIR, out_specs=ROWS)
    assert_equal(run(*operands()), plain(*operands()))


def test_runs_where_jit_is_disabled():
    def loss(function):
        return lambda *values: jnp.sum(function(*values) ** 2)

    run = jax.shard_map(pair, mesh=tp_mesh(4), in_specs=PAIR, out_specs=ROWS)
    values = operands()
    with jax.disable_jit():
        assert_equal(run(*values), plain(*values))
        found = jax.grad(loss(run), argnums=(0, 1, 2))(*values)
    expected = jax.grad(loss(plain), argnums=(0, 1, 2))(*values)
    jax.tree.map(assert_equal, found, expected)


@pytest.mark.parametrize("axis", [0, 2, *nightly(1)])
def test_vmap_over_activations_is_one_call(axis):
    _, w, _ = operands()
    xs = jnp.moveaxis(small_integers(3, (5, 8, 6)), 0, axis)
    spec = [None, "tp", None] if axis == 0 else ["tp", None, None]
    if axis == 1:
        spec = ["tp", None, None]
    run = on_ranks(
        jax.vmap(column, in_axes=(axis, None)),
        tp_mesh(4),
        (P(*spec), COLUMNS),
        P(None, None, "tp"),
    )
    expected = jax.vmap(jnp.matmul, in_axes=(axis, None))(xs, w)
    assert_equal(run(xs, w), expected)
    assert calls(compiled_text(run, xs, w)) == {"all_gather_matmul": 1}
    gradient = jax.grad(lambda xs, w: jnp.sum(run(xs, w) ** 2), (0, 1))
    plain_gradient = jax.grad(lambda xs, w: jnp.sum(jnp.matmul(
        jnp.moveaxis(xs, axis, 0), w) ** 2), (0, 1))  # fmt: skip
    assert_equal(jax.jit(gradient)(xs, w), jax.jit(plain_gradient)(xs, w))


@pytest.mark.parametrize("method", ["ring_exchange", "bulk"])
def test_vmap_of_a_pair_and_its_gradients(method):
    _, w1, w2 = operands()
    xs = small_integers(3, (3, 8, 6))

    options = by_method(method, tp_mesh(4))

    def layers(x, w1, w2):
        return row(column(x, w1, **options), w2, method="ring_exchange")

    run = on_four(jax.vmap(layers, in_axes=(0, None, None)), P(None, "tp"), STACKED)

    def loss(layers):
        return lambda *v: jnp.sum(layers(*v) * small_integers(9, (3, 8, 6)))

    step = jax.jit(jax.value_and_grad(loss(run), (0, 1, 2)))
    expected = jax.jit(jax.value_and_grad(loss(plain), (0, 1, 2)))
    assert_equal(step(xs, w1, w2), expected(xs, w1, w2))


def test_vmap_over_kernels_is_a_loop():
    x, _, _ = operands()
    ws = small_integers(3, (5, 6, 12))
    run = on_ranks(
        jax.vmap(column, in_axes=(None, 0)),
        tp_mesh(4),
        (ROWS, P(None, None, "tp")),
        P(None, None, "tp"),
    )
    expected = jax.vmap(jnp.matmul, in_axes=(None, 0))(x, ws)
    assert_equal(run(x, ws), expected)
    gradient = jax.grad(lambda x, ws: jnp.sum(run(x, ws) ** 2), (0, 1))
    plain_gradient = jax.grad(
        lambda x, ws: jnp.sum(jax.vmap(jnp.matmul, (None, 0))(x, ws) ** 2), (0, 1)
    )
    assert_equal(jax.jit(gradient)(x, ws), jax.jit(plain_gradient)(x, ws))


def test_vmap_of_a_gradient_keeps_the_kernels_separate():
    x, w, _ = operands()
    xs = small_integers(3, (3, 8, 6))

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(column(x, w) ** 2))(w)

    run = on_ranks(
        jax.vmap(gradient, in_axes=(0, None)),
        tp_mesh(4),
        (P(None, "tp"), COLUMNS),
        P(None, None, "tp"),
    )
    expected = jax.vmap(
        jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), in_axes=(None, 0)
    )(w, xs)
    assert_equal(run(xs, w), expected)


def test_vmap_with_a_residual_repeats_what_is_not_mapped():
    _, _, w = operands()
    xs, residual = small_integers(3, (3, 8, 12)), small_integers(4, (8, 6))
    run = on_ranks(
        jax.vmap(lambda x, w, r: row(x, w, residual=r), in_axes=(0, None, None)),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp"), ROWS),
        P(None, "tp"),
    )
    assert_equal(run(xs, w, residual), xs @ w + residual)


POLICIES = {
    # The policy, and how often the forward GEMM runs: twice if its result is not saved.
    "nothing_saveable": 2,
    "dots_saveable": 2,
    "everything_saveable": 1,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_keeps_gradients_and_repeats_what_it_must(policy):
    values = operands()

    def loss(x, w1, w2):
        call = jax.checkpoint(pair, policy=getattr(jax.checkpoint_policies, policy))
        return lax.psum(jnp.sum(call(x, w1, w2) ** 2), "tp")

    run = on_four(loss, out_specs=P())
    step = jax.jit(jax.grad(run, (0, 1, 2)))
    expected = jax.grad(lambda *v: jnp.sum(plain(*v) ** 2), (0, 1, 2))(*values)
    assert_equal(step(*values), expected)


@pytest.mark.parametrize(("name", "num_forwards"), [("gathered", 1), ("other", 2)])
def test_gathered_operand_is_saved_by_name_or_gathered_again(name, num_forwards):
    x, w, _ = operands()
    policy = jax.checkpoint_policies.save_only_these_names(f"jax_ub.{name}")

    def loss(x, w):
        def layer(x, w):
            y, _ = column(x, w, return_gathered=True, method="ring_exchange")
            return jnp.sum(y)

        return lax.psum(jax.checkpoint(layer, policy=policy)(x, w), "tp")

    run = on_ranks(loss, tp_mesh(4), (ROWS, COLUMNS), P())
    step = jax.jit(jax.value_and_grad(run, (0, 1)))
    expected = jax.value_and_grad(lambda x, w: jnp.sum(x @ w), (0, 1))(x, w)
    assert_equal(step(x, w), expected)
    assert calls(compiled_text(step, x, w)) == {
        "all_gather_matmul": num_forwards,
        "matmul_reduce_scatter": 1,
        "wgrad": 1,
    }


@pytest.mark.parametrize(("name", "num_products"), [("y", 2), ("other", 3)])
def test_products_are_saved_by_name_or_multiplied_again(name, num_products):
    values = operands()
    policy = jax.checkpoint_policies.save_only_these_names(f"jax_ub.{name}")

    def loss(x, w1, w2):
        def layer(x, w1, w2):
            return jnp.sum(row(jnp.sin(column(x, w1)), w2) ** 2)

        return lax.psum(jax.checkpoint(layer, policy=policy)(x, w1, w2), "tp")

    step = jax.jit(jax.value_and_grad(on_four(loss, out_specs=P()), (0, 1, 2)))
    assert calls(compiled_text(step, *values)) == {
        "all_gather_matmul": num_products,
        "matmul_reduce_scatter": num_products,
        "wgrad": 2,
    }


def test_scan_over_layers_and_its_gradient():
    x, _, _ = operands()
    w1s, w2s = small_integers(1, (3, 6, 12)), small_integers(2, (3, 12, 6))

    def layers(x, w1s, w2s):
        return lax.scan(lambda x, ws: (pair(x, *ws), None), x, (w1s, w2s))[0]

    stacked = P(None, None, "tp"), P(None, "tp")
    run = on_four(layers, in_specs=(ROWS, *stacked))

    def loss(layers):
        return lambda *v: jnp.sum(layers(*v) * small_integers(9, (8, 6)))

    def plain_layers(x, w1s, w2s):
        for w1, w2 in zip(w1s, w2s, strict=True):
            x = plain(x, w1, w2)
        return x

    step = jax.jit(jax.value_and_grad(loss(run), (0, 1, 2)))
    expected = jax.jit(jax.value_and_grad(loss(plain_layers), (0, 1, 2)))
    assert_equal(step(x, w1s, w2s), expected(x, w1s, w2s))


def test_while_loop_and_uniform_cond():
    x, w1, w2 = operands()

    def loop(x, w1, w2, n, choice):
        x = lax.fori_loop(0, n, lambda _, x: pair(x, w1, w2) % 3, x)
        return lax.cond(choice, lambda: pair(x, w1, w2), lambda: 2 * x)

    run = on_four(loop, in_specs=(ROWS, COLUMNS, P("tp"), P(), P()))
    expected = x
    for _ in range(4):
        expected = plain(expected, w1, w2) % 3
    assert_equal(run(x, w1, w2, 4, True), plain(expected, w1, w2))
    assert_equal(run(x, w1, w2, 4, False), 2 * expected)


def test_donated_operands_and_ahead_of_time_compilation():
    values = operands()
    expected = plain(*values)
    placed = place(values)
    function = jax.shard_map(pair, mesh=tp_mesh(4), in_specs=PAIR, out_specs=ROWS)
    compiled = jax.jit(function, donate_argnums=0).lower(*placed).compile()
    assert_equal(compiled(*placed), expected)
    assert placed[0].is_deleted()


def test_export_with_the_published_checks():
    values = operands()
    run = on_four(pair)
    with pytest.raises(ValueError, match=r"custom calls whose targets have no"):
        jax.export.export(run)(*values)
    exported = jax.export.export(run, disabled_checks=ub.export_safety_checks)(*values)
    assert_equal(jax.jit(exported.call)(*place(values)), plain(*values))


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (7, 4, 6, 5)])
def test_exported_program_runs_on_other_devices_and_in_another_order(order):
    values = operands()
    export = jax.export.export(on_four(pair), disabled_checks=ub.export_safety_checks)
    loaded = jax.export.deserialize(export(*values).serialize(vjp_order=1))
    mesh = Mesh(np.array(devices(8))[list(order)], ("tp",))
    values = jax.device_put(values, tuple(NamedSharding(mesh, s) for s in PAIR))

    def loss(function):
        return lambda *values: jnp.sum(function(*values) ** 2)

    assert_equal(jax.jit(loaded.call)(*values), plain(*values))
    found = jax.jit(jax.grad(loss(loaded.call), argnums=(0, 1, 2)))(*values)
    expected = jax.grad(loss(plain), argnums=(0, 1, 2))(*operands())
    jax.tree.map(assert_equal, found, expected)


def test_exported_groups_of_ranks_stay_separate():
    x, w = small_integers(0, (8, 6)), small_integers(1, (6, 8))
    specs = P(("dp", "tp")), COLUMNS
    run = on_ranks(column, dp_tp_mesh(2, 2), specs, P("dp", "tp"))
    export = jax.export.export(run, disabled_checks=ub.export_safety_checks)
    mesh = Mesh(np.array(devices(4))[[2, 0, 1, 3]].reshape(2, 2), ("dp", "tp"))
    placed = jax.device_put((x, w), tuple(NamedSharding(mesh, s) for s in specs))
    assert_equal(jax.jit(export(x, w).call)(*placed), x @ w)


def test_exported_program_of_any_batch_is_plain_jax_and_a_named_method_is_refused():
    x, w1, w2 = operands()
    x = jnp.stack([x, -x])
    (batch,) = jax.export.symbolic_shape("batch")

    def export(method):
        run = on_four(
            lambda x, w1, w2: row(column(x, w1, method=method), w2, method=method),
            P(None, "tp"),
            (P(None, "tp"), *PAIR[1:]),
        )
        shape = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
        checks = {"disabled_checks": ub.export_safety_checks}
        return jax.export.export(run, **checks)(shape, w1, w2)

    exported = export(None)
    assert "@jax_ub$" not in exported.mlir_module()
    assert ub.fallbacks()[-1].label == "matmul_reduce_scatter"
    assert "symbolic sizes, and inside" in ub.fallbacks()[-1].reason
    if jax.__version_info__ < (0, 12):  # which finds no sizes inside shard_map at all
        values = jax.device_put((x, w1, w2), NamedSharding(tp_mesh(4), P()))
        assert_equal(jax.jit(exported.call)(*values), plain(x, w1, w2))
    text = 'method "direct" cannot run: it is exported with symbolic sizes'
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=text):
        export("direct")


def test_program_exported_for_several_platforms_is_plain_jax():
    values = operands()

    def export(method):
        run = on_four(
            lambda x, w1, w2: row(column(x, w1, method=method), w2, method=method)
        )
        return jax.export.export(run, platforms=["cpu", "cuda"])(*values)

    ub.fallbacks(clear=True)
    exported = export(None)
    assert "@jax_ub$" not in exported.mlir_module()
    reason = "it is exported for several platforms, cpu, cuda; export it once for each"
    assert {one.reason for one in ub.fallbacks()} == {reason}
    assert_equal(jax.jit(exported.call)(*place(values)), plain(*values))
    text = f'method "direct" cannot run: {reason}'
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=text):
        export("direct")


def test_mesh_that_is_set_instead_of_passed():
    values = operands()
    with jax.set_mesh(tp_mesh(4)):
        run = jax.jit(jax.shard_map(pair, in_specs=PAIR, out_specs=ROWS))
        assert_equal(run(*values), plain(*values))


def test_shard_map_inside_a_shard_map_over_the_other_axis():
    x, w = small_integers(0, (4, 8, 6)), small_integers(1, (6, 12))

    def inner(x, w):
        specs = (P(None, "tp"), COLUMNS)
        return jax.shard_map(
            column, in_specs=specs, out_specs=P(None, None, "tp"), axis_names={"tp"}
        )(x, w)

    outer = jax.shard_map(
        inner,
        mesh=dp_tp_mesh(2, 4),
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    assert_equal(jax.jit(outer)(x, w), x @ w)


def test_forward_mode_is_refused():
    x, w, _ = operands()
    run = on_ranks(column, tp_mesh(4), (ROWS, COLUMNS), FEATURES)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (x, w), (x, w))
    y, of_tangents = jax.linearize(run, x, w)
    assert_equal(y, x @ w)
    with pytest.raises(TypeError, match="forward-mode"):
        of_tangents(x, w)


def test_second_derivatives_are_refused():
    def loss(w):
        return jnp.sum(ub.linear(jnp.ones((2, 3)), w) ** 2)

    def norm(w):
        return jnp.sum(jax.grad(loss)(w) ** 2)

    message = "linear: forward-mode differentiation and second derivatives"
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=message):
        jax.grad(norm)(jnp.ones((3, 4)))


def test_dtype_promotion_of_numpy_operands():
    x, w, _ = operands()
    run = on_ranks(column, tp_mesh(4), (ROWS, COLUMNS), FEATURES)
    assert_equal(run(np.asarray(x), np.asarray(w)), x @ w)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_may_be_an_axis_of_vmap_for_plain_jax(sequence_parallel):
    options = {
        "axis_name": "tp",
        "method": "xla",
        "sequence_parallel": sequence_parallel,
    }

    def layers(x, up, down):
        h = ub.linear(x, up, parallel="column", **options)
        return ub.linear(h, down, parallel="row", **options)

    x, up, down = (
        small_integers(i, shape) for i, shape in enumerate([(8, 6), (6, 12), (12, 5)])
    )
    rows = x.reshape(4, 2, 6) if sequence_parallel else jnp.stack([x] * 4)
    ups = jnp.stack(jnp.split(up, 4, axis=1))
    mapped = jax.vmap(layers, axis_name="tp")
    y, pull = jax.vjp(mapped, rows, ups, down.reshape(4, 3, 5))
    expected, expected_pull = jax.vjp(lambda x, u, d: x @ u @ d, x, up, down)
    assert_equal(y.reshape(-1, 5)[:8], expected)
    # The gradient of a replicated result is divided among the ranks.
    dx, dup, ddown = jax.jit(pull)(y if sequence_parallel else y / 4)
    wanted = expected_pull(expected)
    dx = dx.reshape(8, 6) if sequence_parallel else dx.sum(0)
    found = dx, jnp.concatenate(list(dup), axis=1), ddown.reshape(12, 5)
    assert_equal(found, wanted)
    options["main_grad"] = jnp.zeros((6, 3))
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="an axis of jax.vmap"):
        mapped(rows, ups, down.reshape(4, 3, 5))
    del options["main_grad"]
    options["method"] = "direct"
    with pytest.raises(ub.errors.ShapeContractError, match="not a manual mesh axis"):
        mapped(rows, ups, down.reshape(4, 3, 5))


def test_an_all_reduce_over_an_axis_of_vmap_has_the_gradients_of_psum(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")

    def reference(x, bias, residual):
        return jax.lax.psum(x, "tp") + bias + residual

    def all_reduce(x, bias, residual):
        return ub.all_reduce(x, axis_name="tp", bias=bias, residual=residual)

    operands = [
        small_integers(i, shape) for i, shape in enumerate([(4, 2, 3), (3,), (2, 3)])
    ]
    dy = small_integers(3, (4, 2, 3))
    pulled = []
    for function in (all_reduce, reference):
        mapped = jax.vmap(function, (0, None, None), axis_name="tp")
        y, pull = jax.vjp(mapped, *operands)
        pulled.append((y, pull(dy)))
    assert_equal(*pulled)


@pytest.mark.parametrize("num_mapped", [2, *nightly(4)])
def test_an_axis_of_vmap_hides_a_mesh_axis_from_plain_jax(num_mapped):
    def layers(x, w):
        y = ub.all_gather_matmul(x, w, axis_name="tp", method="xla")
        return ub.matmul_all_reduce(y, w.T, axis_name="tp", method="xla")

    def reference(x, w):
        y = jax.lax.all_gather(x, "tp", axis=0, tiled=True) @ w
        return jax.lax.psum(y @ w.T, "tp")

    xs = small_integers(0, (4 * num_mapped, 2, 6))
    ws = small_integers(1, (4 * num_mapped, 6, 3))
    found = []
    for function in (layers, reference):
        mapped = jax.vmap(function, axis_name="tp")
        step = jax.value_and_grad(lambda *a, f=mapped: f(*a).sum(), (0, 1))

        def run(x, w, step=step):
            return jax.tree.map(lambda y: y[None], step(x, w))

        found.append(
            on_ranks(run, tp_mesh(4), P("tp"), P("tp"), check_vma=False)(xs, ws)
        )
    assert_equal(*found)
