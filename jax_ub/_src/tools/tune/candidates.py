"""Lists the methods and kernel options that `tune` measures for each op and size."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp

from jax_ub._src.config.tuned_file import COLUMN_GRADIENTS, LOCAL_OPS, TunedKey
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant, has_pairs
from jax_ub._src.runtime.device_groups import heap_bytes

_SPLITS = (1, 2, 4)
_LANES = (2, 1, 3)
_MARGINS = (0, 2)
_ALGORITHMS = (1, 2, 3)
# Numbers of thread blocks to try for kernels that send data to peers: few suffice for
# small messages.
_BLOCKS = (4, 16)
# Bytes per element of a partial sum on a CPU, where partial sums are f32.
_F32_BYTES = 4


def candidates(
    case: TunedKey, is_cuda: bool, dgrad: MethodChoice | None = None
) -> list[MethodChoice]:
    """Returns the method choices to time for a case, most promising first, "xla" last.

    A choice is a method, such as "ring_exchange", with its number of splits and its
    kernel options. On a GPU, candidates also vary the number of GEMM streams and of
    multiprocessors that GEMMs leave free; with the defaults of both, they vary
    cuBLASLt's algorithm. Copy engines communicate, which use no multiprocessors. If
    chunks are not split, kernels on the multiprocessors left free are tried, too. Ops
    without communication only vary the algorithm.

    Args:
        case: the op and its sizes.
        is_cuda: whether the op runs on GPUs.
        dgrad: for the gradients of a column layer, the best choice for its dgrad as a
            GEMM+RS; None otherwise.
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
    # Kernels send messages that are too small for copy engines, so nothing is split.
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
    """Returns the candidates for the two gradients of a column-parallel layer together.

    They are method "bulk" with several kernel options, and methods that run GEMM+RS for
    dgrad before wgrad. Bulk runs its two GEMMs one after the other, so the number of
    streams has no effect.
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
    """Yields the methods and variants that apply to the case, with default options."""
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
        # The variant sends a split after the GEMM of the next split. A CPU rank runs
        # one step at a time, so it gains nothing.
        if is_cuda and case.op != "all_gather_matmul":
            later = KernelOptions(variant=Variant.OVERLAP_FIRST_GEMM)
            yield MethodChoice(Method.PIPELINE, num_splits, later)
    yield MethodChoice(Method.EXTERNAL)


def _fits_one_shot(case, is_cuda):
    """Returns whether a one-shot all-reduce of this size fits the communication memory.

    The memory is what `initialize_ub` allocates for the shape of the case.
    """
    platform = "cuda" if is_cuda else "cpu"
    itemsize = jnp.dtype(case.dtype).itemsize if is_cuda else _F32_BYTES
    num_elements = case.M * case.N
    sent = (case.num_ranks - 1) * num_elements * itemsize
    return sent <= heap_bytes(platform, num_elements)
