"""Lists the cases that `tune` measures, and builds the candidates of each."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant, has_pairs
from jax_ub._src.parallel import OVERLAPPED, ROW
from jax_ub._src.primitives import matmuls
from jax_ub._src.primitives.call import Execution
from jax_ub._src.rules.backward import column_gradients
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.runtime.communicators import heap_bytes
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, LOCAL_OPS, TunedKey
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, COLUMNS, FORWARD_SPECS, ROWS, Ranks, Spec
from jax_ub._src.tools.programs import Programs, own_gemm


def cases(
    shape: Shape, num_ranks: int, dtype: str, is_cuda: bool
) -> Iterator[TunedKey]:
    """Yields the ops and sizes to tune for a column-parallel and a row-parallel layer.

    The row-parallel layer follows the column-parallel one, so its dgrad is an AG+GEMM
    with the sizes of the column layer, and is not a case of its own. The two gradients
    of a column layer together are a separate case. On GPUs, GEMMs without
    communication are cases, too, because they have algorithms to choose from.
    """
    if num_ranks > 1:
        for op in (*OVERLAPPED, COLUMN_GRADIENTS):
            is_row = op in OVERLAPPED and OVERLAPPED[op].parallel == ROW
            M, K, N = shape.sizes("MNK" if is_row else "MKN")
            yield TunedKey(op, num_ranks, M, K, N, dtype)
    if is_cuda:
        local_N = shape.N // num_ranks
        column = Shape(shape.M, shape.K, local_N)
        for layer, op in itertools.product((column, column.row), LOCAL_OPS):
            layout, _ = _LOCAL[op]
            M, K, N = layer.sizes({"nn": "MKN", "nt": "MNK", "tn": "KMN"}[layout])
            yield TunedKey(op, 1, M, K, N, dtype)


def dgrad_of(case: TunedKey) -> TunedKey:
    """Returns the case of a column-parallel layer's dgrad, a GEMM + reduce-scatter."""
    return dataclasses.replace(case, op="matmul_reduce_scatter", K=case.N, N=case.K)


# Maps the GEMMs without communication to (layout, dimensions of the operands). In
# layout "nt", the second operand is transposed, in "tn" the first. The third operand,
# if there is one, is an addend, which the result overwrites.
_LOCAL = {
    "matmul": ("nn", ("MK", "KN")),
    "dgrad": ("nt", ("MK", "NK")),
    "dgrad_add": ("nt", ("MK", "NK", "MN")),
    "wgrad": ("tn", ("KM", "KN")),
    "wgrad_accumulate": ("tn", ("KM", "KN", "MN")),
}
# Maps each op to (dimensions of the operands, their shardings, shardings of the
# results).
_OPERANDS: dict[str, tuple[tuple[str, ...], tuple[Spec, ...], Any]] = {
    **{op: (("MK", "KN"), *specs) for op, specs in FORWARD_SPECS.items()},
    COLUMN_GRADIENTS: (("MK", "KN", "MN"), (ROWS, COLUMNS, COLUMNS), (ROWS, COLUMNS)),
    **{op: (dims, (Spec(),) * len(dims), Spec()) for op, (_, dims) in _LOCAL.items()},
}


def programs(case: TunedKey) -> Programs:
    """Returns the builder of an op's programs, with random operands on the devices."""
    ranks = Ranks(case.num_ranks)
    dims, in_specs, out_specs = _OPERANDS[case.op]
    shape = Shape(case.M, case.K, case.N)
    operands = ranks.draw(case.dtype, [*map(shape.sizes, dims)], in_specs)
    if case.op == "wgrad_accumulate":
        operands[-1] = operands[-1].astype("float32")
    carry = 2 if case.op in _LOCAL and len(dims) == 3 else None
    return Programs(ranks, operands, in_specs, out_specs, carry)


def function(case: TunedKey, choice: MethodChoice) -> Callable[..., Any]:
    """Returns a per-device function that runs the op with the method `choice`."""
    if case.op == COLUMN_GRADIENTS:
        return _column_gradients(case, choice)
    if case.op in _LOCAL:
        return own_gemm(choice, _LOCAL[case.op][0])
    execution = Execution(
        label=f"tune {case.op}",
        choice=choice,
        axis_name=(AXIS,),
        num_ranks=case.num_ranks,
    )

    def forward(x, w):
        run = getattr(matmuls, case.op)
        if case.op == "all_gather_matmul":
            return run(execution, x, (w,), out_dtype=x.dtype)[0][0]
        return run(execution, (x,), (w,), out_dtype=x.dtype)

    return forward


def _column_gradients(case, choice):
    dtype = jnp.dtype(case.dtype)
    config = CallConfig(
        label=f"tune {case.op}",
        axis_name=(AXIS,),
        num_ranks=case.num_ranks,
        choice=choice,
        is_vma_checked=True,
    ).with_dtypes(dtype, dtype)

    def gradients(x, w, dy):
        saved = {"x": x, "gathered": None, "ws": (w,), "main_grads": None}
        dx, dws = column_gradients(config, saved, {0: dy}, None)
        return dx, dws[0]

    return gradients


_XLA = MethodChoice(Method.XLA)
_NUM_SPLITS = (1, 2, 4)
_STREAMS_AND_MARGINS = [
    KernelOptions(num_lanes=num_lanes, sm_margin=margin)
    for num_lanes, margin in itertools.product((2, 1, 3), (4, 0))
]
# Numbers of the cuBLASLt algorithms to time. The engine asks cuBLASLt for eight
# algorithms, and by default uses number 0. Calls that communicate have many other
# candidates, so fewer algorithms are tried for them.
_ALGORITHMS = [KernelOptions(gemm_algorithm=number) for number in range(1, 8)]
_FIRST_ALGORITHMS = _ALGORITHMS[:3]
# Options with which GPU kernels send the data, in place of copy engines. The kernels
# run on the multiprocessors that GEMMs leave free. A few thread blocks suffice for
# small messages.
_KERNELS = [
    KernelOptions(use_ce=False, num_sm=num_blocks, sm_margin=num_blocks)
    for num_blocks in (4, 16)
]
# Bytes per element of partial sums on CPUs, where partial sums are always f32.
_F32_BYTES = 4


def candidates(
    case: TunedKey, is_cuda: bool, dgrad: MethodChoice | None = None
) -> list[MethodChoice]:
    """Returns the method choices to time, the most promising first and "xla" last.

    On a GPU, candidates also vary the number of GEMM streams and of multiprocessors
    that GEMMs leave free; with the defaults of both, they vary cuBLASLt's algorithm.
    Ops without communication only vary the algorithm. For the gradients of a column
    layer, `dgrad` is the best choice for its dgrad as a GEMM+RS.
    """
    if case.op == COLUMN_GRADIENTS:
        return _column_gradient_choices(is_cuda, dgrad)
    if case.op in LOCAL_OPS:
        options = [KernelOptions(), *(_ALGORITHMS if is_cuda else [])]
        return [*_with_options(Method.DIRECT, options), _XLA]
    choices = list(_with_default_options(case, is_cuda))
    if not is_cuda:
        return [*choices, _XLA]
    # GPU kernels send only small messages faster than copy engines do. Splitting small
    # messages gains nothing, so kernels are tried without splits.
    unsplit = [
        choice
        for choice in choices
        if choice.num_splits <= 1
        and choice.kernel_options.variant is not Variant.OVERLAP_FIRST_GEMM
    ]
    tuned = [
        *itertools.product([*_STREAMS_AND_MARGINS, *_FIRST_ALGORITHMS], choices),
        *itertools.product(_KERNELS, unsplit),
    ]
    return [*itertools.starmap(_merge, tuned), _XLA]


def _merge(options, choice):
    """Returns `choice` with `options`, but with the schedule variant of `choice`."""
    variant = choice.kernel_options.variant
    options = dataclasses.replace(options, variant=variant)
    return dataclasses.replace(choice, kernel_options=options)


def _with_options(method, options):
    return [MethodChoice(method, kernel_options=each) for each in options]


def _column_gradient_choices(is_cuda, dgrad):
    """Returns the method choices to time for the gradients of a column-parallel layer.

    They are "bulk" with several kernel options, and methods that compute the gradient
    of x as a GEMM+RS, such as `dgrad`, before the gradient of the kernel.

    The number of streams has no effect on "bulk", whose two GEMMs run one after the
    other.
    """
    separate = MethodChoice(Method.RING_EXCHANGE if is_cuda else Method.DIRECT)
    options = [KernelOptions()]
    if is_cuda:
        options += [KernelOptions(sm_margin=0), *_FIRST_ALGORITHMS, *_KERNELS]
    choices = [*_with_options(Method.BULK, options), separate, dgrad or separate, _XLA]
    return list(dict.fromkeys(choices))


def _with_default_options(case, is_cuda) -> Iterator[MethodChoice]:
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
        # `OVERLAP_FIRST_GEMM` starts the GEMM of split i + 1 before it sends split i.
        # On CPUs this gains nothing, because a rank runs one step at a time.
        if is_cuda and case.op != "all_gather_matmul":
            later = KernelOptions(variant=Variant.OVERLAP_FIRST_GEMM)
            yield MethodChoice(Method.PIPELINE, num_splits, later)
    yield MethodChoice(Method.EXTERNAL)


def _fits_one_shot(case, is_cuda):
    """Returns whether a one-shot all-reduce fits into the buffers of `initialize_ub`.

    In this variant, each rank sends all its partial sums to every other rank.
    """
    itemsize = jnp.dtype(case.dtype).itemsize if is_cuda else _F32_BYTES
    num_elements = case.M * case.N
    sent_bytes = (case.num_ranks - 1) * num_elements * itemsize
    return sent_bytes <= heap_bytes("cuda" if is_cuda else "cpu", num_elements)
