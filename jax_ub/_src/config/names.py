"""The names of Transformer Engine's twelve overlaps, and the defaults of each method.

A name is "<layer>_<pass>": "qkv_fprop" is the forward pass of the layers with
`ub_name="qkv"`. Users may add other names; these must configure `comm_type`.
"""

from jax_ub._src.config.config import HIGHEST_PRIORITY, LOWEST_PRIORITY, CommOverlapType
from jax_ub._src.methods import Method

_AG, _RS = CommOverlapType.AG, CommOverlapType.RS

FPROP, DGRAD, WGRAD = PASSES = ("fprop", "dgrad", "wgrad")

# Default method and communication type of each pass of a column-parallel and of a
# row-parallel layer.
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
    """Splits an overlap's name, such as "qkv_dgrad", into layer and pass.

    A name without a pass has the pass "fprop".
    """
    layer, _, direction = name.rpartition("_")
    return (layer, direction) if layer and direction in PASSES else (name, FPROP)


def method_defaults(
    method: Method, comm_type: CommOverlapType, num_ranks: int
) -> dict[str, object]:
    """Returns Transformer Engine's default settings of a method, such as its splits.

    Args:
        method: the method. Methods that Transformer Engine lacks get the thread blocks
            of "ring_exchange", whose copy engines need none.
        comm_type: the communication type. Only gathered operands are FP8 by default.
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
