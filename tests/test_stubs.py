"""The engines' stubs, jax_ub/_cpu.pyi and _cuda.pyi, say what the modules have."""

import ast
import pathlib

import jax.numpy as jnp
import pytest

import jax_ub

PACKAGE = pathlib.Path(jax_ub.__file__).parent


def built(name):
    return pytest.importorskip(f"jax_ub.{name}", reason=f"jax_ub.{name} is not built")


def stub_of(name):
    """By name what a stub declares: of a class, its members; None for the others."""
    tree = ast.parse((PACKAGE / f"{name}.pyi").read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                one.name if isinstance(one, ast.FunctionDef) else one.target.id
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AnnAssign)
            }
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = None
    return found


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_a_stub_has_the_names_and_members_of_its_module(name):
    module, stub = built(name), stub_of(name)
    assert public(module) <= set(stub)
    for known in public(module) & {n for n, members in stub.items() if members}:
        assert public(getattr(module, known)) == stub[known], known
    # What is left are the types of dictionaries, which no module has.
    assert all(stub[left] is not None for left in set(stub) - public(module))


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ("Counters", lambda cpu: cpu.counters()),
        ("CallSiteType", lambda cpu: cpu.call_site_type()),
        ("Trace", lambda cpu: cpu.read_trace()),
        ("Stages", lambda cpu: cpu.targets()["jax_ub$matmul"]),
    ],
)
def test_a_dictionary_has_the_keys_that_the_stub_says(of, found):
    assert set(found(built("_cpu"))) == stub_of("_cpu")[of]


def test_a_traced_call_has_the_keys_that_the_stub_says():
    cpu = built("_cpu")
    with jax_ub.trace():
        jax_ub.linear(jnp.ones((4, 4)), jnp.ones((4, 4))).block_until_ready()
    (call,) = cpu.read_trace()["calls"]
    assert set(call) == stub_of("_cpu")["TracedCall"]
