"""The plain formulas: products and all-gathers of FP8 arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import compiled_text, on_ranks, tp_mesh

from jax_ub._src import reference

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu


def test_every_product_of_two_codes_is_exact():
    codes = np.arange(256, dtype=np.uint8)
    x, w = (codes.view(dtype) for dtype in (E4M3, E5M2))
    x, w = x[np.isfinite(x.astype("f"))], w[np.isfinite(w.astype("f"))]
    found = reference.dot(jnp.asarray(x)[:, None], jnp.asarray(w)[None])
    np.testing.assert_array_equal(found, np.outer(x.astype("f"), w.astype("f")))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E8M0])
def test_fp8_is_gathered_as_bytes(dtype):
    x = jnp.asarray(2.0 ** np.random.default_rng(0).integers(-9, 7, (8, 32)), dtype)
    gather = on_ranks(
        lambda x: reference.all_gather(x, "tp"), tp_mesh(4), P("tp"), P("tp")
    )
    np.testing.assert_array_equal(gather(x), jnp.concatenate([x] * 4))
    lines = compiled_text(gather, x).splitlines()
    (gathered,) = (line for line in lines if " all-gather(" in line)
    assert "= u8[8,32]" in gathered
