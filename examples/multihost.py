"""Trains on several hosts: tensor parallelism inside a host, data parallelism between.

    srun python examples/multihost.py                                 # under Slurm
    python -m jax_ub launch -n 4 --hosts 2 examples/multihost.py      # on one machine

If processes are started in another way, pass --coordinator, --num-processes and
--process-id to each. docs/multihost.md has the job files.

Processes may have one or several devices. The devices of a host share memory, so each
linear layer overlaps its GEMM with communication. XLA sums gradients between hosts.
"""

import argparse
import hashlib
import math
import os
import socket

# Threads of jaxlib's pools, at least 4 per device. jaxlib reads it when JAX starts.
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub

# Tokens are sharded over the devices of a host, and the batch over hosts. Kernels are
# sharded over the devices of a host, and replicated over hosts.
TOKENS = P("dp", "tp")
KERNELS = {"up": P(None, "tp"), "down": P("tp"), "scale": P()}


def parse_flags() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0; not under Slurm",
    )
    add("--num-processes", type=int, help="number of processes; not under Slurm")
    add("--process-id", type=int, help="index of this process; not under Slurm")
    add("--tp", type=int, help="devices that share a model (default: all of a host)")
    for name, default, meaning in (
        ("--steps", 20, "training steps"),
        ("--batch", 4, "sequences per step and replica"),
        ("--seq-len", 128, "tokens per sequence"),
        ("--d-model", 128, "features of a token"),
        ("--layers", 2, "layers of the model"),
    ):
        add(name, type=int, default=default, help=f"{meaning} (default: {default})")
    flags = parser.parse_args()
    for name in ("tp", "steps", "batch", "seq_len", "d_model", "layers"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give at least 1")
    return flags


def say(text: str) -> None:
    """Prints in process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


def join(flags: argparse.Namespace) -> None:
    """Connects this process to its job.

    Raises:
        SystemExit: if neither the flags nor the environment specify the job.
    """
    where = flags.coordinator, flags.num_processes, flags.process_id
    try:
        jax.distributed.initialize(*where)
    except ValueError as error:
        raise SystemExit(
            f"this process belongs to no job: {error} Start it with python -m jax_ub "
            "launch, Slurm or MPI, or give --coordinator, --num-processes and "
            "--process-id."
        ) from error


def devices_by_host() -> list[list[jax.Device]]:
    """Gathers the host names of all processes and groups devices by host."""
    name = os.environ.get("JAX_UB_HOST_ID") or socket.gethostname()
    digest = hashlib.sha256(name.encode()).digest()[:4]
    hosts = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    found: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        host = int(hosts.reshape(-1)[device.process_index])
        found.setdefault(host, []).append(device)
    return list(found.values())


def make_mesh(tp: int | None) -> Mesh:
    """Arranges the devices as a mesh, with each tp group inside one host.

    Raises:
        SystemExit: if a host's number of devices is not a multiple of `tp`.
    """
    hosts = devices_by_host()
    sizes = [len(host) for host in hosts]
    most = math.gcd(*sizes)
    if tp is None and most < max(sizes):
        say(f"hosts have {sizes} devices: if all had as many, more could share a model")
    tp = tp or most
    if most % tp:
        raise SystemExit(
            f"--tp {tp} does not divide the hosts' devices: {sizes}: give {most} or a "
            "divisor of it, or start as many processes on each host"
        )
    groups = np.array([device for host in hosts for device in host]).reshape(-1, tp)
    say(f"{len(hosts)} hosts with {sizes} devices: dp={len(groups)}, tp={tp}")
    return Mesh(groups, ("dp", "tp"))


def check_sizes(flags: argparse.Namespace, tp: int) -> None:
    """Checks that the devices of a tp group get equal shards.

    Raises:
        SystemExit: if a size is not divisible; suggests another value.
    """
    # The MLP has 4 * d_model hidden features.
    for name, size, each in (
        ("--seq-len", flags.seq_len, 1),
        ("--d-model", flags.d_model, 4),
    ):
        if each * size % tp:
            raise SystemExit(
                f"{name} {size} does not divide into the {tp} devices that share a "
                f"model: give {-(-size // tp) * tp}, or another --tp"
            )


def loss_on_device(params: list[dict], x: jax.Array, wanted: jax.Array) -> jax.Array:
    """Computes the global mean squared error; x has this device's tokens."""
    y = x
    for layer in params:
        h = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * layer["scale"]
        h = ub.linear(h, layer["up"], parallel="column", axis_name="tp")
        y = y + ub.linear(jax.nn.gelu(h), layer["down"], parallel="row", axis_name="tp")
    return lax.pmean(jnp.mean((y - wanted) ** 2), ("dp", "tp"))


def make_params(mesh: Mesh, num_layers: int, width: int) -> list[dict]:
    """Initializes equal parameters on every replica, sharded over its devices."""

    def make(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (4 * width, width)) / width / 2,
            "scale": jnp.ones(width),
        }

    shardings = {name: NamedSharding(mesh, spec) for name, spec in KERNELS.items()}
    keys = jax.random.split(jax.random.key(0), num_layers)
    return [jax.jit(make, out_shardings=shardings)(key) for key in keys]


def make_batch(mesh: Mesh, flags: argparse.Namespace, step: int) -> list[jax.Array]:
    """Creates the shards of this process; the targets are the reversed features."""
    shape = (flags.batch * mesh.shape["dp"], flags.seq_len, flags.d_model)

    def read(index):
        values = np.random.default_rng(step).standard_normal(shape, np.float32)
        return values[index]

    sharding = NamedSharding(mesh, TOKENS)
    x = jax.make_array_from_callback(shape, sharding, read)
    wanted = jax.make_array_from_callback(shape, sharding, lambda i: read(i)[..., ::-1])
    return [x, wanted]


def main() -> None:
    """Trains the model; process 0 prints the losses."""
    flags = parse_flags()
    join(flags)
    mesh = make_mesh(flags.tp)
    check_sizes(flags, mesh.shape["tp"])
    num_tokens = flags.batch * flags.seq_len  # per replica
    ub.initialize_ub((num_tokens, flags.d_model), mesh.shape["tp"], mesh=mesh)
    params = make_params(mesh, flags.layers, flags.d_model)
    loss = jax.shard_map(
        loss_on_device,
        mesh=mesh,
        in_specs=([KERNELS] * flags.layers, TOKENS, TOKENS),
        out_specs=P(),
    )

    @jax.jit
    def step(params, x, wanted):
        value, gradients = jax.value_and_grad(loss)(params, x, wanted)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value

    for number in range(flags.steps):
        params, value = step(params, *make_batch(mesh, flags, number))
        with ub.errors.raised():
            value = float(value)  # waits for the step
        if number % 5 == 0 or number == flags.steps - 1:
            say(f"step {number}: loss {value:.4f}")
    for fallback in dict.fromkeys(ub.fallbacks()):
        say(f"not overlapped: {fallback.label}: {fallback.reason}")
    ub.destroy_ub()


if __name__ == "__main__":
    main()
