"""Programs that are lowered for CUDA where there is no GPU, and what stands in them."""

import collections
import re
import types

import jax

import jax_ub as ub

WORKSPACE_BYTES = 4096


class StandIn(types.SimpleNamespace):
    """A `jax_ub._cuda` that runs nothing: it knows a size, and notes who asked."""

    def __init__(self, **attributes):
        super().__init__(
            asked=[],
            why_not=lambda: None,
            why_no_peers=lambda ordinals: None,
            **attributes,
        )

    def workspace_bytes(self, op, attributes, operands, results):
        self.asked.append((op, attributes, operands, results))
        return WORKSPACE_BYTES


def cuda_text(function, *operands) -> str:
    """The program of a jitted function, as it is lowered for CUDA."""
    return function.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def exported_cuda_text(function, *operands) -> str:
    """The same, lowered to be exported."""
    export = jax.export.export(
        function, platforms=["cuda"], disabled_checks=ub.export_safety_checks
    )
    return export(*operands).mlir_module()


def custom_calls(text: str) -> list[tuple[str, str]]:
    """Name, without its "jax_ub$", and the rest of the line of each of our calls."""
    return re.findall(r"stablehlo\.custom_call @jax_ub\$(\w+)(.*)", text)


def called(text: str) -> collections.Counter:
    """How often each of our targets is called."""
    return collections.Counter(name for name, _ in custom_calls(text))


def attribute(call: str, name: str) -> int | str:
    """The value of an attribute of a call."""
    found = re.search(rf'\b{name} = (?:(-?\d+) : i64|"([^"]*)")', call)
    assert found, f"{name} is none of the attributes of {call}"
    return int(found[1]) if found[1] is not None else found[2]


def collectives(text: str) -> collections.Counter:
    """How often XLA's own collectives occur."""
    names = "all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute"
    return collections.Counter(re.findall(rf"stablehlo\.({names})\b", text))


def shape(*sizes, dtype="float32"):
    """An array that is only traced."""
    return jax.ShapeDtypeStruct(sizes, dtype)
