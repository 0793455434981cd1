"""The ways to run a product with its communication that are worth timing."""

import itertools
from collections.abc import Iterator

from jax_ub.methods import Method
from jax_ub.overlap_config.tuned import Choice
from jax_ub.overlap_config.tuning import Tuning

_SPLITS = (1, 2, 4)
_LANES = (2, 1, 3)
_MARGINS = (0, 2)
_ALGORITHMS = (1, 2, 3)


def candidates(is_cuda: bool) -> list[Choice]:
    """Every choice, the likeliest first, and not to overlap at all last.

    On a GPU the streams of products and the multiprocessors that they leave free are
    choices too, and cuBLASLt's algorithm where those are the defaults; communication is
    the copy engines', which take no multiprocessors.
    """
    ways = list(_methods(is_cuda))
    if is_cuda:
        tunings = [
            *itertools.starmap(_tuning, itertools.product(_LANES, _MARGINS)),
            *(Tuning(gemm_algorithm=number) for number in _ALGORITHMS),
        ]
        ways = [
            Choice(way.method, way.num_splits, tuning)
            for tuning, way in itertools.product(tunings, ways)
        ]
    return [*ways, Choice(Method.XLA)]


def _tuning(num_lanes, sm_margin):
    return Tuning(num_lanes=num_lanes, sm_margin=sm_margin)


def _methods(is_cuda) -> Iterator[Choice]:
    if not is_cuda:
        yield Choice(Method.DIRECT)
    yield Choice(Method.RING_EXCHANGE)
    for num_splits in _SPLITS:
        yield Choice(Method.PIPELINE, num_splits)
    yield Choice(Method.EXTERNAL)
