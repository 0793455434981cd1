"""The names of Transformer Engine's twelve overlaps, and what every method defaults to.

A name is "<layer>_<pass>": "qkv_fprop" is the forward of the layers with
`ub_name="qkv"`. Free names beyond the twelve say themselves what they communicate.
"""

from jax_ub.methods import Method
from jax_ub.overlap_config.config import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    CommOverlapType,
)

_AG, _RS = CommOverlapType.AG, CommOverlapType.RS

FPROP, DGRAD, WGRAD = PASSES = ("fprop", "dgrad", "wgrad")

# By layer and pass: the default method, and what it communicates.
_COLUMN = {
    FPROP: (Method.RING_EXCHANGE, _AG),
    DGRAD: (Method.BULK, _AG),
    WGRAD: (Method.BULK, _RS),
}
_ROW = {
    FPROP: (Method.PIPELINE, _RS),
    DGRAD: (Method.RING_EXCHANGE, _AG),
    WGRAD: (Method.EXTERNAL, _AG),
}
_LAYERS = {"qkv": _COLUMN, "fc1": _COLUMN, "proj": _ROW, "fc2": _ROW}

NAMES = {
    f"{layer}_{direction}": default
    for layer, passes in _LAYERS.items()
    for direction, default in passes.items()
}


def split_name(name: str) -> tuple[str, str]:
    """The layer and the pass of a name; a name that ends in none is a forward's."""
    layer, _, direction = name.rpartition("_")
    return (layer, direction) if layer and direction in PASSES else (name, FPROP)


def method_defaults(
    method: Method, comm_type: CommOverlapType, num_ranks: int
) -> dict[str, object]:
    """Transformer Engine's configuration of a method.

    Args:
        method: the method; those that Transformer Engine has not need no thread blocks
            of their own, as little as the ring's copy engines.
        comm_type: what is communicated: only gathered operands are FP8 by default.
        num_ranks: P, the number of chunks in a ring.
    """
    sends_by_kernel = method in (Method.PIPELINE, Method.BULK, Method.EXTERNAL)
    return {
        "num_sm": 16 if sends_by_kernel else 1,
        "cga_size": 2 if sends_by_kernel else 1,
        "set_sm_margin": sends_by_kernel,
        "num_splits": num_ranks if method is Method.RING_EXCHANGE else 4,
        "aggregate": False,
        "use_ce": True,
        "fp8_buf": comm_type is _AG,
        "comm_priority": HIGHEST_PRIORITY,
        "gemm_priority": LOWEST_PRIORITY,
        "pipeline_rs_overlap_first_gemm": False,
    }
