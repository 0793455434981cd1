"""Random programs of calls and transformations, with gradients, against plain JAX.

The same program runs with jax_ub and with `plain_functions`, inside one shard_map and
under the same transformations: whatever JAX means by them, both mean.
"""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import connect, devices
from operands import assert_equal, small_integers
from plain_functions import Plain
from random_calls import small
from random_programs import POLICIES, Programs

import jax_ub as ub

pytestmark = [
    pytest.mark.slow,
    # Some programs differentiate a kernel, but not its main_grad.
    pytest.mark.filterwarnings("ignore:.*but not of main_grad"),
]

MESHES = (
    {"tp": (1, 2, 3, 4, 5, 6, 7, 8)},
    {"dp": (2,), "tp": (2, 3, 4)},
    {"tp": (2, 3), "dp": (2,)},
    {"dp": (2,), "pp": (1, 2), "tp": (2,)},
    {"tp": (3,), "pp": (2,)},
)


class Program:
    """A random program on a random mesh, and its operands."""

    def __init__(self, seed, *, runs_once=True, is_tiny=False):
        self.draw = draw = random.Random(seed)
        sizes = {axis: draw.choice(n) for axis, n in draw.choice(MESHES).items()}
        ranks = devices(math.prod(sizes.values()))
        draw.shuffle(ranks)
        self.mesh = Mesh(np.array(ranks).reshape(*sizes.values()), tuple(sizes))
        programs = Programs(draw, sizes, runs_once)
        programs.is_compiled = not is_tiny
        connect(self.mesh, programs.axis_name)
        batch = [draw.randint(1, 3) for _ in range(draw.choice([0, 0, 1, 1, 2]))]
        rows = draw.choice([1, 2, 3]) * draw.choice([1, programs.num_ranks])
        x = programs.parameter(*batch, rows, programs.size())
        size = (1, 1) if is_tiny else (2, draw.choice([1, 2, 3]))
        self.programs, self.chain = programs, programs.chain(x.shape, *size)
        parameters = (x, *self.chain.parameters)
        self.specs = tuple(P(parameter.axes) for parameter in parameters)
        self.operands = tuple(map(self.value, range(len(parameters)), parameters))
        self.floats = [i for i, v in enumerate(self.operands) if v.dtype != jnp.int32]
        # The indices of the operands that are differentiated; the others are frozen.
        self.wanted = self.floats
        if draw.random() < 0.5:
            self.wanted = draw.sample(self.floats, draw.randint(1, len(self.floats)))
        self.num_pulls = draw.choice([1, 1, 1, 2])
        self.cotangent = small_integers(99, (self.mesh.size, *self.chain.shape))

    def value(self, seed, parameter):
        """Returns the concatenated shards of a parameter on all devices."""
        num_parts = math.prod(self.mesh.shape[axis] for axis in parameter.axes)
        return small_integers(seed, (num_parts, *parameter.shape), parameter.dtype)

    def on_mesh(self, functions):
        def run(x, *values):
            y = self.chain.run(functions, tuple(v[0] for v in values), x[0])
            return self.programs.everywhere(y.astype(jnp.float32))[None]

        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=self.specs,
            out_specs=P(self.mesh.axis_names),
            check_vma=self.programs.check_vma,
        )

    def step(self, function):
        """Returns a function (cotangent, *operands) -> (y, wanted gradients).

        In some programs it pulls back two cotangents, one after the other.
        """

        def step(cotangent, *operands):
            def call(*wanted):
                filled = list(operands)
                for i, operand in zip(self.wanted, wanted, strict=True):
                    filled[i] = operand
                return function(*filled)

            y, pull = jax.vjp(call, *(operands[i] for i in self.wanted))
            pulls = range(self.num_pulls)
            return y, [pull(jnp.roll(cotangent, i, -1)) for i in pulls]

        return step

    def check(
        self,
        run=jax.jit,
        around=lambda f: f,
        operands=None,
        seen=lambda results: results,
    ):
        """Compares the step in jax_ub, run by `run`, with compiled plain JAX.

        Args:
            run: what is done with the step: a function of its operands.
            around: a transformation of the program, in jax_ub and in plain JAX.
            operands: of the step, and so cotangent first; None is its own.
            seen: what `run` returns of the step's results.
        """
        operands = operands or (self.cotangent, *self.operands)
        plain = around(self.on_mesh(Plain(self.programs.check_vma)))
        expected = seen(jax.jit(self.step(plain))(*operands))
        assert_equal(run(self.step(around(self.on_mesh(ub))))(*operands), expected)


def jitted(seed):
    Program(seed).check()


def without_jit(seed):
    Program(seed, is_tiny=True).check(lambda step: step)


def without_any_jit(seed):
    program = Program(seed, is_tiny=True)
    with jax.disable_jit():
        found = program.step(program.on_mesh(ub))(program.cotangent, *program.operands)
    program.check(lambda step: lambda *operands: found)


def with_nans_looked_for(seed):
    with jax.debug_nans(True):
        Program(seed).check()


def with_a_zero_cotangent(seed):
    program = Program(seed)
    operands = (jnp.zeros_like(program.cotangent), *program.operands)
    program.check(operands=operands)


def ahead_of_time_and_three_in_flight(seed):
    def run(step):
        def compiled(*operands):
            call = jax.jit(step).lower(*operands).compile()
            found = [call(*operands) for _ in range(3)]
            jax.tree.map(assert_equal, found[1:], found[:1] * 2)
            return found[0]

        return compiled

    Program(seed).check(run)


def donated(seed):
    program = Program(seed)
    num_operands = 1 + len(program.operands)
    places = program.draw.sample(range(num_operands), num_operands // 2)

    def run(step):
        call = jax.jit(step, donate_argnums=places)
        return lambda *operands: call(*jax.tree.map(jnp.copy, operands))

    program.check(run)


def recomputed(seed):
    program = Program(seed)
    policy = program.draw.choice(POLICIES)
    program.check(around=lambda call: jax.checkpoint(call, policy=policy))


def mapped(seed):
    """Applies `jax.vmap` around the shard_map, over some of the operands."""
    program = Program(seed, runs_once=False)
    axes: list[int | None] = [None] * len(program.operands)
    operands = list(program.operands)
    for i in program.draw.sample(
        program.floats, program.draw.randint(1, len(program.floats))
    ):
        axes[i] = program.draw.choice([0, operands[i].ndim])
        others = small_integers(i + 50, operands[i].shape, operands[i].dtype)
        operands[i] = jnp.stack([operands[i], others], axes[i])
    cotangent = small_integers(98, (2, *program.cotangent.shape))
    # JAX may map different operands, so it may sum cotangents before or after `small`.
    # Therefore only their remainders are compared.
    program.check(
        lambda step: jax.jit(lambda *operands: jax.tree.map(small, step(*operands))),
        lambda call: jax.vmap(call, in_axes=tuple(axes)),
        (cotangent, *operands),
        seen=lambda results: jax.tree.map(small, results),
    )


def with_several_cotangents(seed):
    program = Program(seed, runs_once=False)
    axes = (0, *(None for _ in program.operands))
    cotangents = small_integers(98, (2, *program.cotangent.shape))
    operands = (cotangents, *program.operands)
    expected, found = (
        jax.jit(jax.vmap(program.step(program.on_mesh(functions)), axes))(*operands)
        for functions in (Plain(program.programs.check_vma), ub)
    )
    assert_equal(found, expected)


def scanned(seed):
    program = Program(seed, runs_once=False)

    def around(call):
        def run(*operands):
            start = jnp.zeros(program.cotangent.shape)
            return lax.scan(lambda y, _: (y + call(*operands), None), start, length=2)[
                0
            ]

        return run

    program.check(around=around)


def exported(seed):
    program = Program(seed)
    specs = (P(program.mesh.axis_names), *program.specs)
    operands = jax.device_put(
        (program.cotangent, *program.operands),
        tuple(NamedSharding(program.mesh, spec) for spec in specs),
    )
    call = jax.jit(program.on_mesh(ub))
    export = jax.export.export(call, disabled_checks=ub.export_safety_checks)
    stored = export(*operands[1:]).serialize(vjp_order=1)
    loaded = jax.export.deserialize(stored)
    program.check(lambda step: jax.jit(program.step(loaded.call)), operands=operands)


WAYS = (
    jitted,
    without_jit,
    without_any_jit,
    with_nans_looked_for,
    with_a_zero_cotangent,
    ahead_of_time_and_three_in_flight,
    donated,
    recomputed,
    mapped,
    with_several_cotangents,
    scanned,
    exported,
)


def seed_of(way, number):
    """Returns the seed of the program with this number that is run in some way.

    Without any jit, each operation of a program is compiled separately. The first
    program is then number 14, with half as many operations as number 0.
    """
    if way is without_any_jit:
        number = {0: 14, 14: 0}.get(number, number)
    return number * len(WAYS) + WAYS.index(way)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("way", WAYS)
def test_a_program_is_plain_jax_to_the_bit(way):
    way(seed_of(way, 0))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("number", range(1, 25))
@pytest.mark.parametrize("way", WAYS)
def test_any_other_program_is_plain_jax_to_the_bit(way, number):
    way(seed_of(way, number))
