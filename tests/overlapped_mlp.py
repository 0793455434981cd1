"""A column layer and a row layer on four ranks, with their operands."""

import jax
import numpy as np
from jax import P
from jax.sharding import NamedSharding
from programs import on_ranks, tp_mesh

import jax_ub as ub

NUM_RANKS = 4
SPECS = (P("tp"), P(None, "tp"), P("tp"))


def operands():
    mesh = tp_mesh(NUM_RANKS)
    shapes = ((64, 16), (16, 32), (32, 16))
    return [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, SPECS, strict=True)
    ]


def mlp(method=None):
    def layers(x, up, down):
        h = ub.all_gather_matmul(x, up, axis_name="tp", ub_name="up", method=method)
        return ub.matmul_reduce_scatter(h, down, axis_name="tp", method=method)

    return on_ranks(layers, tp_mesh(NUM_RANKS), SPECS, P("tp"))
