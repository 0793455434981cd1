"""Random parameters of layers, which are not compiled as their initializers are."""

import jax
import jax.numpy as jnp
import numpy as np

# Variables with one initial value: FP8 states, accumulators, and counts of PRNG keys.
_INITIAL = {"_scale": 1, "_amax_history": 0, "main_grad": 0, "count": 0}


def random_parameters(shapes):
    """Returns random parameters as NumPy arrays: no bias is zero, and no scale is one.

    FP8 states and accumulators have their initial values, and PRNG keys are equal.
    """
    random = np.random.default_rng(0)

    def values(path, leaf):
        name = path[-1].key
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        for suffix, value in _INITIAL.items():
            if name.endswith(suffix):
                return np.full(leaf.shape, value, leaf.dtype)
        noise = 0.15 * random.standard_normal(leaf.shape) + (name == "scale")
        return noise.astype(leaf.dtype)

    return jax.tree.map_with_path(values, shapes)
