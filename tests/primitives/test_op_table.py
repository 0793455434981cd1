"""The engine's table of ops agrees with the primitives."""

import dataclasses
import importlib
import pkgutil
import typing

import pytest

from jax_ub import _cpu
from jax_ub._src import primitives
from jax_ub._src.primitives.call import Call


def all_calls():
    for module in pkgutil.iter_modules(primitives.__path__, primitives.__name__ + "."):
        importlib.import_module(module.name)
    pending, found = [Call], {}
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "op" in vars(cls):
            found[cls.op] = cls
    return found


CALLS = all_calls()


def call_of(cls):
    """Returns a call without its checks; `gather` selects no operand."""
    call = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = None if field.name == "gather" else 1
        if field.name == "gemm":
            value = call_of(typing.get_type_hints(cls)["gemm"])
        object.__setattr__(call, field.name, value)
    return call


def test_every_op_has_a_primitive_and_a_target():
    assert set(_cpu.ops()) == set(CALLS)
    assert set(_cpu.targets()) == {f"jax_ub${op}" for op in CALLS}
    assert set(_cpu.counters()["calls"]) == set(CALLS)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_an_op_has_the_attributes_of_its_primitive(op):
    assert set(_cpu.ops()[op]["attributes"]) == set(call_of(CALLS[op]).options())


@pytest.mark.parametrize("op", sorted(CALLS))
def test_an_op_communicates_as_its_primitive_says(op):
    call, row = call_of(CALLS[op]), _cpu.ops()[op]
    assert row["collective"].startswith("all_gather") or not call.gathers
    assert call.replicates == row["collective"].endswith("all_reduce")
    assert call.communicates_only == (not row["has_gemm"])
