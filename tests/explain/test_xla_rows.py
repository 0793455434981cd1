"""Tests the rows of `ub.explain` for collectives and dots that XLA runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from flax import nnx
from jax import P
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from overlapped_mlp import SPECS, mlp, operands
from programs import cache_options, dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.prediction.hardware import HARDWARE

COLUMN = {"0": "column"}


def test_pairs_of_a_collective_and_a_dot_are_listed():
    def layers(x, up, down):
        h = jax.lax.all_gather(x, "tp", axis=0, tiled=True) @ up
        return jax.lax.psum_scatter(h @ down, "tp", scatter_dimension=0, tiled=True)

    found = ub.explain(on_ranks(layers, tp_mesh(4), SPECS, P("tp")), *operands())
    assert [(row.op, row.overlapped, row.reason) for row in found.rows] == [
        ("all-gather + dot", False, "XLA's own: could be one ub.all_gather_matmul"),
        (
            "dot + reduce-scatter",
            False,
            "XLA's own: could be one ub.matmul_reduce_scatter",
        ),
    ]
    assert found.rows[0].moved_bytes == 3 * 16 * 16 * 4
    assert all("test_xla_rows.py:" in row.source for row in found.rows)
    assert " test_xla_rows.py:" in str(found)
    times = [row.predicted_s for row in found.rows]
    # The times of the pairs are those of method "xla".
    calls = ub.explain(mlp(), *operands()).rows
    xla, rest = MethodChoice(Method.XLA), (4, np.float32, HARDWARE["cpu"])
    assert times == [
        estimate(calls[0].op, xla, 64, 16, 32, *rest).seconds,
        estimate(calls[1].op, xla, 64, 32, 16, *rest).seconds,
    ]


def test_collectives_of_the_partitioner_are_listed():
    def layers(x, up, down):
        y = (x @ up) @ down
        return jax.lax.with_sharding_constraint(y, NamedSharding(tp_mesh(4), P()))

    found = ub.explain(layers, *operands())
    # The partitioner chooses the collectives.
    assert {row.method for row in found.rows} == {"xla"}
    assert found.title == f"layers: 0 of {len(found.rows)} overlapped"
    assert all(row.moved_bytes > 0 for row in found.rows)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_layers_that_jax_ub_method_turned_off_are_named(pass_name, monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    run = mlp()
    if pass_name == "backward":
        run = jax.grad(lambda *args: mlp()(*args).sum(), argnums=(0, 1, 2))
    ub.fallbacks(clear=True)
    found = ub.explain(run, *operands())
    assert {row.scope for row in found.rows} == {"up", "matmul_reduce_scatter"}
    assert {row.reason for row in found.rows} == {'method = "xla" (from JAX_UB_METHOD)'}
    assert ub.fallbacks() == ()


def test_local_layers_of_method_xla_are_not_listed():
    layer = functools.partial(ub.linear, parallel=None, axis_name=None, method="xla")
    assert ub.explain(layer, jnp.ones((8, 4)), jnp.ones((4, 4))).rows == ()


def test_reductions_of_other_values_than_the_dot_are_not_pairs():
    def layers(x, w):
        logits = x @ w
        largest = jax.lax.pmax(logits.max(-1), "tp")
        return jax.lax.psum(jnp.exp(logits - largest[:, None]).sum(-1), "tp")

    run = on_ranks(layers, tp_mesh(4), (P(), P(None, "tp")), P())
    found = ub.explain(run, jnp.ones((64, 16)), operands()[1])
    assert found.rows == ()
    assert "without a dot next to them: all-reduce x 2" in found.notes[0]


@pytest.mark.parametrize("num_gathers", [1, 2])
def test_several_gathers_of_activations_have_a_note(num_gathers):
    def gathered(x, up, down):
        h = ub.all_gather_matmul(x, up, axis_name="tp")
        y = ub.matmul_reduce_scatter(h, down, axis_name="tp")
        outputs = [jnp.tanh(y), jnp.cos(y)][:num_gathers]
        return [jax.lax.all_gather(z, "tp", axis=0, tiled=True) for z in outputs]

    run = on_ranks(gathered, tp_mesh(4), SPECS, P(), check_vma=False)
    x, up, down = operands()
    notes = ub.explain(run, x, up, down).notes
    advice = (
        "2 all-gathers are of activations or their gradients: on an explicit mesh, "
        "shard the tokens over the axis after the embedding"
    )
    assert (advice in notes) is (num_gathers == 2)


def test_gathered_kernels_and_their_gradients_have_no_note():
    def gradients(x, up):
        up = jax.lax.all_gather(up, "tp", axis=1, tiled=True)

        def loss(x, up):
            y = ub.all_gather_matmul(x, up[:, :8], axis_name="tp")
            return (y**2).sum()

        dw = jax.grad(loss, 1)(x, up)[:, :8]
        outputs = jnp.tanh(dw), jnp.cos(dw)
        return [jax.lax.all_gather(z, "tp", axis=1, tiled=True) for z in outputs]

    run = on_ranks(gradients, tp_mesh(4), SPECS[:2], P(), check_vma=False)
    found = ub.explain(run, *operands()[:2])
    assert "without a dot next to them: all-gather x " in found.notes[-1]


@pytest.mark.parametrize("num_arrays", [3, 7])
def test_every_array_of_a_combined_collective_is_counted(num_arrays):
    def layers(xs, w):
        return [jax.lax.psum(x @ w, "tp") for x in xs]

    run = on_ranks(layers, tp_mesh(4), (P(None, "tp"), P("tp")), P())
    xs = [jnp.ones((8 * (i + 1), 16)) for i in range(num_arrays)]
    found = ub.explain(run, xs, jnp.ones((16, 32)))
    assert not found.overlapped
    tokens = sum(len(x) for x in xs)
    assert sum(row.count * row.moved_bytes for row in found.rows) == 6 * 32 * tokens
    assert sum(row.count * row.flops for row in found.rows) == 2 * 4 * 32 * tokens
    assert {row.axis for row in found.rows} == {"tp"}
    text = f"one of {num_arrays} arrays of a collective"
    assert {row.note for row in found.rows} == {text}
    assert max(len(line.split("  ")[0]) for line in str(found).splitlines()[3:]) <= 64


@pytest.mark.parametrize("has_calls", [True, False])
def test_gradient_sums_over_the_batch_are_not_missed_overlaps(has_calls):
    with jax.set_mesh(dp_tp_mesh(2, 2)):
        layer = ub.overlap(nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0))]), COLUMN)[0]
        head, x = jnp.ones((16, 8)), jax.device_put(jnp.ones((4, 8, 16)), P("dp"))

        def loss(head, layer, x):
            y = layer(x) if has_calls else x
            return jnp.sin(x @ head).sum() + jnp.sin(y).sum()

        found = ub.explain(nnx.value_and_grad(loss), head, layer, x)
    assert found.overlapped
    assert [row.op for row in found.rows] == ["all_gather_matmul"] * has_calls
    text = "data parallelism over dp: all-reduce of gradients x 1, sends 512 B"
    assert text in found.notes


class _Block(nnx.Module):
    """A norm, and linears with biases: eight parameters."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(x + self.down(nnx.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    ("spec", "note"),
    [
        (P("dp"), "data parallelism over dp: all-reduce of gradients"),
        (P(None, "tp"), "tokens sharded over tp: all-reduce of gradients"),
    ],
)
def test_gradient_sums_of_plain_layers_are_not_missed_overlaps(spec, note):
    def loss(model, x):
        return (model(x) ** 2).sum()

    with jax.set_mesh(dp_tp_mesh(2, 2)):
        x = jax.device_put(jnp.ones((4, 8, 16)), spec)
        found = ub.explain(nnx.value_and_grad(loss), _Block(nnx.Rngs(0)), x)
    assert found.rows == ()
    # The biases are combined with the kernels, and the sum of the loss, too.
    assert found.notes == (
        "XLA's collectives without a dot next to them: all-reduce x 1",
        f"{note} x 8, sends 4.8 KiB",
    )


@covering(is_scanned=[False, True], tokens_are_sharded=[False, True])
def test_only_sums_of_activation_gradients_are_missed(tokens_are_sharded, is_scanned):
    """Sums the gradients of replicated kernels, or of the tokens of a column layer."""

    def block(x, ws):
        y = jnp.tanh(jnp.sin(x) @ ws[0]) @ ws[1]
        return (y if tokens_are_sharded else jax.lax.psum(y, "tp")), None

    def loss(x, ws):
        y, _ = jax.lax.scan(block, x, ws) if is_scanned else block(x, ws)
        return (y**2).sum()

    kernels = [np.ones((16, 64), np.float32), np.ones((64, 16), np.float32)]
    specs = P("tp"), (P(), P())
    if not tokens_are_sharded:
        specs = (
            P(),
            (P(*[None] * is_scanned, None, "tp"), P(*[None] * is_scanned, "tp")),
        )
    if is_scanned:
        kernels = [np.stack([w] * 3) for w in kernels]
    run = on_ranks(jax.grad(loss, (0, 1)), tp_mesh(4), specs, specs)
    found = ub.explain(run, jnp.ones((8, 16)), tuple(kernels))
    note = "tokens sharded over tp: all-reduce of gradients x 2, sends 12.0 KiB"
    assert (note in found.notes) is tokens_are_sharded
    # Of a column layer, its gradient in the backward pass and the row layer's result.
    assert len(found.rows) == (0 if tokens_are_sharded else 2)


def test_the_gradient_of_an_activation_that_has_the_shape_of_an_argument_is_missed():
    """Here the tokens are an argument, and kernels are computed from parameters."""

    def loss(kernels, x):
        for up, down in kernels:
            y = jax.lax.psum(jnp.tanh(x @ jnp.sin(up)) @ jnp.sin(down), "tp")
            x = x + y
        return (x**2).sum()

    specs = [(P(None, "tp"), P("tp"))] * 2
    kernels = [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 2
    run = on_ranks(jax.grad(loss), tp_mesh(4), (specs, P()), specs)
    found = ub.explain(run, kernels, jnp.ones((8, 16)))
    # The results of both row layers, and the input gradient of the second column layer.
    assert [row.count for row in found.rows] == [2, 1]
    assert found.notes == ()


def test_axes_that_only_share_a_scale_are_not_tensor_parallel():
    mesh = dp_tp_mesh(2, 2)

    def scale(x):
        return ub.quantize(x, axis_name=("dp", "tp")).scales

    def loss(head, x):
        scales = on_ranks(scale, mesh, P("dp", None, "tp"), P())(x)
        return (jnp.sin(x @ head) * scales).sum()

    x = jax.device_put(jnp.ones((4, 8, 16)), NamedSharding(mesh, P("dp")))
    found = ub.explain(jax.grad(loss), jnp.ones((16, 8)), x)
    assert found.overlapped
    text = "data parallelism over dp: all-reduce of gradients x 1, sends 512 B"
    assert text in found.notes


@pytest.mark.parametrize("gathered", ["tokens", "kernel"])
def test_gathered_kernels_are_data_parallelism_and_tokens_are_not(gathered):
    def layer(x, w):
        if gathered == "tokens":
            return jax.lax.all_gather(x, "tp", tiled=True) @ w
        return x @ jax.lax.all_gather(w, "tp", tiled=True)

    specs = (P("tp"), P()) if gathered == "tokens" else (P(), P("tp"))
    arrays = [
        jax.device_put(jnp.ones(shape), NamedSharding(tp_mesh(4), spec))
        for shape, spec in zip(((64, 16), (16, 8)), specs, strict=True)
    ]
    found = ub.explain(
        on_ranks(layer, tp_mesh(4), specs, P(), check_vma=False), *arrays
    )
    assert found.overlapped is (gathered == "kernel")
    text = "data parallelism over tp: all-gather of parameters x 1, sends 384 B"
    assert (text in found.notes) is (gathered == "kernel")


@pytest.mark.parametrize("kind", ["column", "row"])
def test_arrays_that_xla_reshards_for_a_call_are_listed(kind):
    with jax.set_mesh(tp_mesh(4)):
        layer = ub.overlap(
            nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0))]), {"0": kind}
        )
        x = jax.device_put(jnp.ones((4, 32, 16)), P(None, "tp"))

        @nnx.jit
        def run(layers, x):
            return jax.lax.with_sharding_constraint(layers[0](x), P())

        found = ub.explain(run, layer, x)
    assert found.overlapped is (kind == "column")
    moved = [row for row in found.rows if row.op == "all-to-all"]
    assert [row.scope for row in moved] == ["0"] * (kind == "row")
    for row in moved:  # tokens are sharded, but a row layer needs sharded features
        assert not row.overlapped
        assert 'Are the kinds "column" and "row" swapped?' in row.reason
        assert row.moved_bytes == 3 * 32 * 16 * 4 // 4
    hint = "shard kernels and activations as these calls do"
    assert found.notes[-1] == f"XLA adds all-gather x 1 next to 0: {hint}"


@pytest.fixture
def cached_programs(tmp_path):
    """Gives the test an empty compilation cache, which keeps all programs."""
    options = cache_options(tmp_path)
    before = {name: getattr(jax.config, name) for name in options}

    def configure(values):
        compilation_cache.reset_cache()
        for name, value in values.items():
            jax.config.update(name, value)

    configure(options)
    yield
    configure(before)


@pytest.mark.usefixtures("cached_programs")
def test_names_come_from_the_program_and_not_from_an_equal_one_in_the_cache():
    def layer(x, w, name):
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name=name, method="xla")

    for name in ("query", "key"):
        run = functools.partial(layer, name=name)
        run = on_ranks(run, tp_mesh(4), SPECS[:2], P(None, "tp"))
        jax.block_until_ready(run(*operands()[:2]))
        (row,) = ub.explain(run, *operands()[:2]).rows
        assert row.scope == name
