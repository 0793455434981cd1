"""Lowers programs for CUDA without a GPU, and reads the lowered text."""

import collections
import re
import types

import jax

import jax_ub as ub

WORKSPACE_BYTES = 4096


class StandIn(types.SimpleNamespace):
    """A fake `jax_ub._cuda` that returns a workspace size and records its calls."""

    def __init__(self, **attributes):
        super().__init__(
            asked=[],
            why_not=lambda: None,
            why_no_peers=lambda ordinals: None,
            why_no_fp8=lambda capability, scaled_unit, version: None,
            needs_contiguous_fp8=lambda capability: capability[0] != 10,
            fp8_multiple=16,
            **attributes,
        )

    def workspace_bytes(self, op, attributes, operands, results):
        self.asked.append((op, attributes, operands, results))
        return WORKSPACE_BYTES


def cuda_text(function, *operands) -> str:
    """Returns the text of a jitted function that is lowered for CUDA."""
    return lowered_text(function, "cuda", *operands)


def lowered_text(function, platform: str, *operands) -> str:
    """Returns the text of a jitted function that is lowered for one platform."""
    return function.trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def exported_cuda_text(function, *operands) -> str:
    """Returns the text of a jitted function that is exported for CUDA."""
    export = jax.export.export(
        function, platforms=["cuda"], disabled_checks=ub.export_safety_checks
    )
    return export(*operands).mlir_module()


def custom_calls(text: str) -> list[tuple[str, str]]:
    """Returns op name and remaining line of each custom call of jax_ub."""
    return re.findall(r"stablehlo\.custom_call @jax_ub\$(\w+)(.*)", text)


def called(text: str) -> collections.Counter:
    """Counts the custom calls of each target of jax_ub."""
    return collections.Counter(name for name, _ in custom_calls(text))


def attribute(call: str, name: str) -> int | str:
    """Returns the value of an attribute of a custom call of jax_ub in lowered text."""
    found = re.search(rf'\b{name} = (?:(-?\d+) : i64|"([^"]*)")', call)
    assert found, f"{name} is none of the attributes of {call}"
    return int(found[1]) if found[1] is not None else found[2]


def collectives(text: str) -> collections.Counter:
    """Counts XLA's collectives in lowered StableHLO text, by name."""
    names = "all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute"
    return collections.Counter(re.findall(rf"stablehlo\.({names})\b", text))


def shape(*sizes, dtype="float32"):
    """Returns a `jax.ShapeDtypeStruct` for an operand that is only traced."""
    return jax.ShapeDtypeStruct(sizes, dtype)
