"""The stubs jax_ub/_cpu.pyi and _cuda.pyi match their extension modules."""

import ast
import pathlib

import jax.numpy as jnp
import pytest

import jax_ub

PACKAGE = pathlib.Path(jax_ub.__file__).parent


def built(name):
    return pytest.importorskip(f"jax_ub.{name}", reason=f"jax_ub.{name} is not built")


def declared(body):
    """Returns the declared functions, properties, annotated names and classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id, node


def stub_of(name):
    """Returns the members of the stub's names: of classes and of TypedDicts.

    TypedDicts exist for type checkers only. Other names have no members.
    """
    had, types = {}, {}
    for known, node in declared(ast.parse((PACKAGE / f"{name}.pyi").read_text()).body):
        is_class = isinstance(node, ast.ClassDef)
        members = {member for member, _ in declared(node.body)} if is_class else None
        is_type = is_class and "TypedDict" in map(ast.unparse, node.bases)
        (types if is_type else had)[known] = members
    return had, types


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_a_stub_has_the_names_and_members_of_its_module(name):
    module, (had, _) = built(name), stub_of(name)
    assert public(module) == set(had)
    for known, members in had.items():
        if members is not None:
            assert public(getattr(module, known)) == members, known


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ("Counters", lambda cpu: cpu.counters()),
        ("CallSiteType", lambda cpu: cpu.call_site_type()),
        ("Trace", lambda cpu: cpu.read_trace()),
        ("Op", lambda cpu: cpu.ops()["matmul"]),
        ("DType", lambda cpu: cpu.dtypes()["f32"]),
        ("Stages", lambda cpu: cpu.targets()["jax_ub$matmul"]),
        ("QuantizeStages", lambda cpu: cpu.quantize_targets()["jax_ub.cast"]),
    ],
)
def test_a_dictionary_has_the_keys_of_its_stub(of, found):
    _, types = stub_of("_cpu")
    assert set(found(built("_cpu"))) == types[of]


def test_a_traced_call_has_the_keys_of_its_stub():
    cpu = built("_cpu")
    with jax_ub.trace():
        jax_ub.linear(jnp.ones((4, 4)), jnp.ones((4, 4))).block_until_ready()
    (call,) = cpu.read_trace()["calls"]
    _, types = stub_of("_cpu")
    assert set(call) == types["TracedCall"]
