"""Programs that an earlier version exported run with this version."""

import re

import jax
import numpy as np
import pytest
from covering import covering
from exported_programs import FOLDER, NUM_RANKS, PROGRAMS, export, operands
from jax.sharding import Mesh, NamedSharding
from operands import assert_equal

import jax_ub as ub
from jax_ub import _cpu


def stored(name):
    return (FOLDER / f"{name}.jax_export").read_bytes()


def load(data):
    return jax.export.deserialize(bytearray(data))


def on_ranks(name, order):
    """Returns a stored program's operands on a mesh of the devices in `order`."""
    mesh = Mesh(np.array(jax.devices())[list(order)], ("tp",))
    specs = PROGRAMS[name][2]
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        operands(name),
        is_leaf=lambda spec: isinstance(spec, jax.P),
    )


@covering(name=PROGRAMS, order=[range(NUM_RANKS), (7, 4, 6, 5)])
def test_stored_program_runs(name, order):
    ub.register_targets()
    found = jax.jit(load(stored(name)).call)(*on_ranks(name, order))
    assert_equal(found, PROGRAMS[name][1](*operands(name)))


def test_stored_programs_call_every_target():
    found = set()
    for name in PROGRAMS:
        found |= set(re.findall(r"@jax_ub\$(\w+)", load(stored(name)).mlir_module()))
    assert found == set(_cpu.ops())


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_exported_today_makes_the_calls_of_the_stored_one(name):
    def calls(data):
        return sorted(re.findall(r"@jax_ub\$(\w+)", load(data).mlir_module()))

    assert calls(export(name)) == calls(stored(name))
