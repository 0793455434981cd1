"""Operations that XLA runs after an overlapped call, on a thread of the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from layouts import visible
from programs import on_ranks, tp_mesh

import jax_ub as ub

# The last rank to arrive completes a small call, the engine's threads a large one.
SIZES = [16, 256]
METHODS = ["direct", "ring_exchange"]


def _runner(method, then, size):
    """Runs `then` on the result of an overlapped call, on each of four ranks."""

    def program(x, w):
        y = ub.all_gather_matmul(x, w, axis_name="tp", method=method)
        return then(y)[None]

    run = on_ranks(program, tp_mesh(4), (P("tp"), P(None, "tp")), P("tp"))
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, size, size), np.float32)
    return functools.partial(run, x, w)


def _rows(array):
    """Returns the rows of the ranks in this process as one NumPy array."""
    return np.concatenate([np.asarray(rows) for _, rows in visible(array)])


@covering(2, method=METHODS, size=SIZES)
def test_subnormals_have_the_same_bits_on_all_ranks_as_with_xla(method, size):
    def then(y):
        # Without abs, jax 0.10 keeps the sign of y, which differs between ranks.
        tiny = jnp.float32(1.5e-38) + jnp.abs(y[0, 0]) * 0
        return jnp.stack([tiny * 0.25, tiny - jnp.float32(1.2e-38), tiny / 3 * 3])

    expected = _rows(_runner("xla", then, size)()).view(np.uint32)
    assert (expected == expected[0]).all()
    run = _runner(method, then, size)
    for _ in range(250):
        np.testing.assert_array_equal(_rows(run()).view(np.uint32), expected)


@covering(method=METHODS, size=SIZES)
def test_callbacks_run_after_a_call(method, size, capfd):
    seen = []

    def then(y):
        first = y[0, 0]
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        doubled = jax.pure_callback(lambda x: np.float32(x * 2), shape, first)
        jax.experimental.io_callback(seen.append, None, first)
        jax.debug.print("value {}", first)
        return jnp.stack([first, doubled])

    run = _runner(method, then, size)
    for _ in range(10):
        rows = _rows(run())
        np.testing.assert_array_equal(rows[:, 1], 2 * rows[:, 0])
    jax.effects_barrier()
    assert len(seen) == 10 * len(rows)
    assert capfd.readouterr().out.count("value ") == 10 * len(rows)


@covering(method=METHODS, size=SIZES)
def test_lapack_runs_after_a_call(method, size):
    def then(y):
        rows = y[: y.shape[1]]
        matrix = rows @ rows.T / size + 10 * jnp.eye(rows.shape[0])
        lower = jnp.linalg.cholesky(matrix)
        values = jnp.linalg.eigh(matrix)[0]
        q, r = jnp.linalg.qr(matrix)
        return (
            jnp.stack(
                [jnp.abs(lower @ lower.T - matrix).max(), jnp.abs(q @ r - matrix).max()]
            )
            + 0 * values.sum()
        )

    errors = _rows(_runner(method, then, size)())
    assert (errors < 1e-3).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_profile_has_what_runs_after_a_call(method, tmp_path):
    run = _runner(method, lambda y: jnp.sin(y).sum(), 256)
    run()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready([run() for _ in range(5)])
    (profile,) = tmp_path.rglob("*.xplane.pb")
    assert b"jax_ub" in profile.read_bytes()
