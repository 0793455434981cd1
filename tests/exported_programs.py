"""The programs in tests/exported, which jax.export stored, and their results.

The files are never overwritten: they show that programs which users exported with an
earlier version still run. They were written with jax 0.10.2, the oldest supported
version, "forward" and "train_step" by jax_ub at commit ef1680a, before the
implementation moved to `jax_ub/_src`, and "all_reduced" when all-reduces first had bias
and residual:

    python tests/exported_programs.py FOLDER
"""

import argparse
import os
import pathlib

os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from operands import small_integers

import jax_ub as ub
from jax_ub import ops
from jax_ub.flax import linen

NUM_RANKS = 4
M, K, N = 8, 12, 20
FOLDER = pathlib.Path(__file__).parent / "exported"
ROWS, FEATURES = P("tp"), P(None, "tp")
COLUMN, ROW = P(None, "tp"), P("tp", None)


def forward(x, up, gate, down, out, bias):
    """Computes a gated MLP, with a different method for each call."""
    (a, b), gathered = ub.all_gather_matmul(
        x, (up, gate), axis_name="tp", method="ring_exchange", return_gathered=True
    )
    h = jax.nn.relu(a) * b
    y = ub.matmul_reduce_scatter(
        h, down, axis_name="tp", bias=bias, residual=x, method="pipeline"
    )
    z = ub.matmul_all_reduce(h, out, axis_name="tp", method="direct")
    return y, z, lax.pmax(gathered, "tp")


def plain_forward(x, up, gate, down, out, bias):
    h = jax.nn.relu(x @ up) * (x @ gate)
    return x + h @ down + bias, h @ out, x


def train_step(params, main_grad, x, dy):
    """Returns the loss, the updated parameters and the gradient sum of `proj`.

    The backward passes overlap by "bulk", by fused calls and not at all.
    """
    up = linen.Linear(N, parallel="column", ub_bulk_dgrad=True, ub_bulk_wgrad=True)
    local = ops.Sequential(ops.AllGather(), ops.BasicLinear(K, K), ops.ReduceScatter())
    summed = ops.Sequential(ops.BasicLinear(K // NUM_RANKS, K), ops.AllReduce())

    def loss(params, main_grad, x):
        x = x + params["shift"]
        h = jax.nn.relu(up.apply({"params": params["up"]}, x))
        y = ub.matmul_reduce_scatter(
            h,
            params["proj"],
            axis_name="tp",
            main_grad=main_grad,
            method="ring_exchange",
        )
        (kernel,) = params["local"]
        y = y + local(({}, {"kernel": kernel}, {}), x)
        (kernel,) = params["summed"]
        part = lax.all_to_all(y, "tp", split_axis=1, concat_axis=0, tiled=True)
        z = summed(({"kernel": kernel}, {}), part)
        return jnp.sum(y * dy) + jnp.sum(z) / NUM_RANKS

    gradients = jax.value_and_grad(loss, (0, 1))
    value, (grads, main_grad) = gradients(params, main_grad, x)
    params = jax.tree.map(lambda p, g: p - g / 2, params, grads)
    return lax.psum(value, "tp"), params, main_grad


def all_reduced(x, bias, residual):
    return ub.all_reduce(x, axis_name="tp", bias=bias, residual=residual)


def plain_all_reduced(x, bias, residual):
    return x.reshape(NUM_RANKS, *residual.shape).sum(0) + bias + residual


PARAM_SPECS = {
    "shift": P(),
    "up": {"kernel": COLUMN, "bias": P("tp")},
    "proj": ROW,
    "local": (P(),),
    "summed": (ROW,),
}


def plain_train_step(params, main_grad, x, dy):
    def loss(params):
        shifted = x + params["shift"]
        h = jax.nn.relu(shifted @ params["up"]["kernel"] + params["up"]["bias"])
        y = h @ params["proj"] + NUM_RANKS * (shifted @ params["local"][0])
        return jnp.sum(y * dy) + jnp.sum(y @ params["summed"][0])

    value, grads = jax.value_and_grad(loss)(params)
    main_grad = main_grad + grads["proj"]
    grads["proj"] = jnp.zeros_like(main_grad)  # main_grad has the gradient
    return value, jax.tree.map(lambda p, g: p - g / 2, params, grads), main_grad


def operands(name: str) -> tuple:
    """Returns global operands of integers, for which all results are exact."""
    x, square = small_integers(0, (M, K)), small_integers(4, (K, K))
    up, down = small_integers(1, (K, N)), small_integers(2, (N, K))
    if name == "all_reduced":
        return x, small_integers(1, (K,)), small_integers(2, (M // NUM_RANKS, K))
    if name == "forward":
        return x, up, small_integers(3, (K, N)), down, down, small_integers(5, (K,))
    params = {
        "shift": small_integers(9, (K,)),
        "up": {"kernel": up, "bias": small_integers(6, (N,))},
        "proj": down,
        "local": (square,),
        "summed": (square,),
    }
    return params, small_integers(7, (N, K)), x, small_integers(8, (M, K))


PROGRAMS = {
    "forward": (
        forward,
        plain_forward,
        (ROWS, COLUMN, COLUMN, ROW, ROW, P()),
        (ROWS, P(), P()),
    ),
    "train_step": (
        train_step,
        plain_train_step,
        (PARAM_SPECS, ROW, ROWS, ROWS),
        (P(), PARAM_SPECS, ROW),
    ),
    "all_reduced": (all_reduced, plain_all_reduced, (ROWS, P(), P()), P()),
}


def export(name: str) -> bytes:
    """Exports a program for four CPU devices with the installed version."""
    function, _, in_specs, out_specs = PROGRAMS[name]
    mesh = Mesh(np.array(jax.devices()[:NUM_RANKS]), ("tp",))
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    )
    exported = jax.export.export(run, disabled_checks=ub.export_safety_checks)
    return bytes(exported(*operands(name)).serialize())


def main() -> None:
    parser = argparse.ArgumentParser(description="Export the programs to FOLDER.")
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_RANKS)
    for name in PROGRAMS:
        (folder / f"{name}.jax_export").write_bytes(export(name))


if __name__ == "__main__":
    main()
