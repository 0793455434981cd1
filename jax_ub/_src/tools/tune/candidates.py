"""Lists the methods and kernel options that `tune` measures for each op and size."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp

from jax_ub._src.config.tuned_file import COLUMN_GRADIENTS, LOCAL_OPS, TunedKey
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant, has_pairs
from jax_ub._src.runtime.device_groups import heap_bytes

_XLA = MethodChoice(Method.XLA)
_NUM_SPLITS = (1, 2, 4)
_STREAMS_AND_MARGINS = [
    KernelOptions(num_lanes=num_lanes, sm_margin=margin)
    for num_lanes, margin in itertools.product((2, 1, 3), (0, 2))
]
_ALGORITHMS = [KernelOptions(gemm_algorithm=number) for number in (1, 2, 3)]
# With these options, kernels on the multiprocessors that GEMMs leave free send the
# data. A few thread blocks suffice for small messages.
_KERNELS = [
    KernelOptions(use_ce=False, num_sm=num_blocks, sm_margin=num_blocks)
    for num_blocks in (4, 16)
]
# Bytes per element of a partial sum on CPUs, which is always f32 there.
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
        options = [KernelOptions(), *(_ALGORITHMS if is_cuda else [])]
        return [*_with_options(Method.DIRECT, options), _XLA]
    choices = list(_with_default_options(case, is_cuda))
    if not is_cuda:
        return [*choices, _XLA]
    # Kernels on multiprocessors are tried only if nothing is split, because they send
    # messages that are too small for copy engines.
    unsplit = [
        choice
        for choice in choices
        if choice.num_splits <= 1
        and choice.kernel_options.variant is not Variant.OVERLAP_FIRST_GEMM
    ]
    tuned = [
        *itertools.product([*_STREAMS_AND_MARGINS, *_ALGORITHMS], choices),
        *itertools.product(_KERNELS, unsplit),
    ]
    return [*itertools.starmap(_merge, tuned), _XLA]


def _merge(options, choice):
    """Returns a method choice with these kernel options, but with its own variant."""
    variant = choice.kernel_options.variant
    options = dataclasses.replace(options, variant=variant)
    return dataclasses.replace(choice, kernel_options=options)


def _with_options(method, options):
    return [MethodChoice(method, kernel_options=each) for each in options]


def _of_column_gradients(is_cuda, dgrad):
    """Returns the method choices to time for dx and dw of a column layer together.

    They are method "bulk" with several kernel options, and methods that run GEMM+RS for
    dgrad before wgrad. Bulk runs its two GEMMs one after the other, so the number of
    streams has no effect.
    """
    separate = MethodChoice(Method.RING_EXCHANGE if is_cuda else Method.DIRECT)
    options = [KernelOptions()]
    if is_cuda:
        options += [KernelOptions(sm_margin=2), *_ALGORITHMS, *_KERNELS]
    choices = [*_with_options(Method.BULK, options), separate, dgrad or separate, _XLA]
    return list(dict.fromkeys(choices))


def _with_default_options(case, is_cuda) -> Iterator[MethodChoice]:
    """Yields the methods and variants to time for a case, with default options."""
    if not is_cuda:
        yield MethodChoice(Method.DIRECT)
    variants = [Variant.PLAIN]
    if case.op == "all_gather_matmul" and has_pairs(case.num_ranks):
        variants.append(Variant.AGGREGATE)
    if case.op == "matmul_all_reduce" and _fits_one_shot(case, is_cuda):
        variants.append(Variant.ONE_SHOT)
    options = [KernelOptions(variant=variant) for variant in variants]
    yield from _with_options(Method.RING_EXCHANGE, options)
    for num_splits in _NUM_SPLITS:
        yield MethodChoice(Method.PIPELINE, num_splits)
        # This variant sends a split after the GEMM of the next split. A CPU rank runs
        # one step at a time, so it gains nothing from it.
        if is_cuda and case.op != "all_gather_matmul":
            later = KernelOptions(variant=Variant.OVERLAP_FIRST_GEMM)
            yield MethodChoice(Method.PIPELINE, num_splits, later)
    yield MethodChoice(Method.EXTERNAL)


def _fits_one_shot(case, is_cuda):
    """Returns whether a one-shot all-reduce fits the communication memory.

    The memory is what `initialize_ub` allocates for the shape of the case.
    """
    itemsize = jnp.dtype(case.dtype).itemsize if is_cuda else _F32_BYTES
    num_elements = case.M * case.N
    sent_bytes = (case.num_ranks - 1) * num_elements * itemsize
    return sent_bytes <= heap_bytes("cuda" if is_cuda else "cpu", num_elements)
