"""The choices of how a product runs with its communication, worth timing."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp

from jax_ub.methods import Method, Variant, has_pairs
from jax_ub.overlap_config.kernel_options import KernelOptions
from jax_ub.overlap_config.method_choice import MethodChoice
from jax_ub.overlap_config.tuned import COLUMN_GRADIENTS, LOCAL_OPS, Case
from jax_ub.runtime.device_groups import heap_bytes

_SPLITS = (1, 2, 4)
_LANES = (2, 1, 3)
_MARGINS = (0, 2)
_ALGORITHMS = (1, 2, 3)
# Thread blocks of kernels that send: few for small messages, more for larger ones.
_BLOCKS = (4, 16)
# Of a partial sum on a CPU.
_F32_BYTES = 4


def candidates(
    case: Case, is_cuda: bool, dgrad: MethodChoice | None = None
) -> list[MethodChoice]:
    """Every choice, the likeliest first, and not to overlap at all last.

    On a GPU the streams of products and the multiprocessors that they leave free are
    choices too, and cuBLASLt's algorithm where those are the defaults. Communication is
    the copy engines', which take no multiprocessors; where nothing is cut into pieces,
    also that of kernels, to which products leave theirs. A rank's own product has
    nothing but algorithms to choose.

    Args:
        case: what is chosen for.
        is_cuda: whether it runs on GPUs.
        dgrad: of a column layer's gradients: what was chosen for its dgrad's product,
            which is a GEMM+RS.
    """
    if case.op == COLUMN_GRADIENTS:
        return _of_column_gradients(is_cuda, dgrad)
    if case.op in LOCAL_OPS:
        tunings = [KernelOptions(gemm_algorithm=number) for number in (0, *_ALGORITHMS)]
        own = [
            MethodChoice(Method.DIRECT, kernel_options=kernel_options)
            for kernel_options in tunings
        ]
        return [*(own if is_cuda else own[:1]), MethodChoice(Method.XLA)]
    choices = list(_untuned(case, is_cuda))
    if not is_cuda:
        return [*choices, MethodChoice(Method.XLA)]
    tunings = [
        *itertools.starmap(_tuning, itertools.product(_LANES, _MARGINS)),
        *(KernelOptions(gemm_algorithm=number) for number in _ALGORITHMS),
    ]
    # Kernels send what is too small for copy engines: it is not cut.
    whole = [
        choice
        for choice in choices
        if choice.num_splits <= 1
        and choice.kernel_options.variant is not Variant.OVERLAP_FIRST_GEMM
    ]
    return [
        *(
            _tuned(choice, kernel_options)
            for kernel_options in tunings
            for choice in choices
        ),
        *(
            _tuned(choice, kernel_options)
            for kernel_options in _by_kernels()
            for choice in whole
        ),
        MethodChoice(Method.XLA),
    ]


def _by_kernels() -> list[KernelOptions]:
    return [KernelOptions(use_ce=False, num_sm=num, sm_margin=num) for num in _BLOCKS]


def _of_column_gradients(is_cuda, dgrad):
    """Bulk, whose products are one after the other: streams change nothing.

    Else the dgrad's own communication, and then the wgrad.
    """
    apart = (
        MethodChoice(Method.RING_EXCHANGE) if is_cuda else MethodChoice(Method.DIRECT)
    )
    tunings = [KernelOptions()]
    if is_cuda:
        tunings += [KernelOptions(sm_margin=margin) for margin in _MARGINS if margin]
        tunings += [KernelOptions(gemm_algorithm=number) for number in _ALGORITHMS]
        tunings += _by_kernels()
    bulk = [
        MethodChoice(Method.BULK, kernel_options=kernel_options)
        for kernel_options in tunings
    ]
    choices = [*bulk, apart, dgrad or apart, MethodChoice(Method.XLA)]
    return list(dict.fromkeys(choices))


def _tuning(num_lanes, sm_margin):
    return KernelOptions(num_lanes=num_lanes, sm_margin=sm_margin)


def _tuned(choice, kernel_options):
    kernel_options = dataclasses.replace(
        kernel_options, variant=choice.kernel_options.variant
    )
    return dataclasses.replace(choice, kernel_options=kernel_options)


def _untuned(case, is_cuda) -> Iterator[MethodChoice]:
    """Methods with their variants, where those do anything."""
    if not is_cuda:
        yield MethodChoice(Method.DIRECT)
    yield MethodChoice(Method.RING_EXCHANGE)
    if case.op == "all_gather_matmul" and has_pairs(case.num_ranks):
        yield MethodChoice(
            Method.RING_EXCHANGE,
            kernel_options=KernelOptions(variant=Variant.AGGREGATE),
        )
    if case.op == "matmul_all_reduce" and _fits_one_shot(case, is_cuda):
        yield MethodChoice(
            Method.RING_EXCHANGE, kernel_options=KernelOptions(variant=Variant.ONE_SHOT)
        )
    for num_splits in _SPLITS:
        yield MethodChoice(Method.PIPELINE, num_splits)
        # A CPU does one step after the other: to put a piece later gains nothing.
        if is_cuda and case.op != "all_gather_matmul":
            later = KernelOptions(variant=Variant.OVERLAP_FIRST_GEMM)
            yield MethodChoice(Method.PIPELINE, num_splits, later)
    yield MethodChoice(Method.EXTERNAL)


def _fits_one_shot(case, is_cuda):
    """Whether `initialize_ub` of the case's own shape makes enough room."""
    platform = "cuda" if is_cuda else "cpu"
    itemsize = jnp.dtype(case.dtype).itemsize if is_cuda else _F32_BYTES
    num_elements = case.M * case.N
    sent = (case.num_ranks - 1) * num_elements * itemsize
    return sent <= heap_bytes(platform, num_elements)
