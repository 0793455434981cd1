"""Applies the `ub_*` flags of a layer to the methods of its passes."""

import dataclasses
from collections.abc import Mapping

from jax_ub._src.config.flags import FUSED, OverlapFlags, flags_of
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.parallel import COLUMN, DGRAD, FPROP, WGRAD, ParallelMode
from jax_ub._src.runtime import cuda_engine
from jax_ub._src.runtime.registry import Overlap


def choices_with_flags(
    mode: ParallelMode,
    label: str,
    flags: OverlapFlags,
    choices: Mapping[str, MethodChoice],
    found: Mapping[str, Overlap],
) -> dict[str, MethodChoice]:
    """Applies a layer's `ub_*` flags to the methods of its forward pass and dgrad.

    Args:
        mode: the layer's row in the table of parallel modes.
        label: the layer's name, for errors.
        flags: the layer's flags.
        choices: the choices of both passes without flags.
        found: the overlaps of the layer's name in `initialize_ub`, by pass.

    Raises:
        ConfigurationError: if a flag contradicts what the user configured.
    """
    if not (mode.sequence_parallel and mode.parallel):
        return dict(choices)  # the layer neither gathers nor scatters
    # The wgrad runs with the dgrad's method.
    for direction, passes in ((FPROP, (FPROP,)), (DGRAD, (DGRAD, WGRAD))):
        overlap = found.get(direction)
        if overlap is None or not overlap.is_configured:
            continue
        source = f'ub_cfgs["{overlap.name}"] with method "{overlap.method}"'
        for name in flags_of(mode, passes):
            flags.check_method(label, name, Method(overlap.method), source)
    forward, dgrad = choices[FPROP], choices[DGRAD]
    if mode.parallel == COLUMN:
        return {
            FPROP: _fused(forward, flags.ub_overlap_ag, gathers=True),
            DGRAD: _column_dgrad(dgrad, flags),
        }
    return {
        FPROP: _fused(forward, flags.ub_overlap_rs, gathers=False),
        DGRAD: _fused(dgrad, flags.ub_overlap_ag, gathers=True),
    }


def _fused(choice, flag, gathers):
    """Applies one flag to a GEMM with an all-gather (`gathers`) or reduce-scatter.

    None keeps the choice, False selects plain JAX, and True selects a method that
    overlaps.
    """
    if flag is None:
        return choice
    if not flag:
        return MethodChoice(Method.XLA)
    if choice.method in FUSED:
        return dataclasses.replace(choice, is_explicit=True)
    return MethodChoice(_engine_method(gathers))


def _engine_method(gathers):
    """Returns the method with which the engine overlaps a GEMM of method "auto".

    Unlike "auto" itself, it never becomes plain XLA.
    """
    if not cuda_engine.is_traced_for():
        return Method.DIRECT
    return Method.PIPELINE if gathers else Method.RING_EXCHANGE


def _column_dgrad(choice, flags):
    """Returns the dgrad's method in a column-parallel layer, as its flags select it.

    It either reduce-scatters its result or, with "bulk", overlaps the all-gather of x.
    """
    scatters, bulk = flags.ub_overlap_rs_dgrad, flags.is_bulk
    if bulk:
        return MethodChoice(Method.BULK)
    if scatters:
        return _fused(choice, True, gathers=False)
    may_be_bulk = choice.method in (Method.BULK, Method.AUTO)
    if scatters is not None and bulk is not None:
        return MethodChoice(Method.XLA)
    if scatters is not None and (choice.method in FUSED or may_be_bulk):
        return MethodChoice(Method.BULK, is_explicit=False)
    if bulk is not None and may_be_bulk:
        return MethodChoice(_engine_method(gathers=False), is_explicit=False)
    return choice
