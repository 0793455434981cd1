"""Functions of the deprecated module `jax_ub.simulate`."""

from jax_ub._src import methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction import estimate as prediction
from jax_ub._src.prediction.hardware import HARDWARE, Hardware


def estimate(  # noqa: PLR0913, the call and the machine
    op: str,
    method: str | Method | MethodChoice,
    M: int,
    K: int,
    N: int,
    P: int,
    dtype,
    hardware: str | Hardware = "h200",
    gathered_dtype=None,
) -> prediction.Prediction:
    """Predicts the time of one call of jax_ub with the simulator's cost model.

    Args:
        op: name of the FFI target without "jax_ub$", such as "all_gather_matmul".
        method: a method, with its options if it is a `MethodChoice`.
        M: number of tokens, summed over all ranks.
        K: global contracting size; for collectives, bulk ops and wgrad, the number of
            features of the communicated tensor.
        N: global number of output features; ignored for collectives.
        P: number of ranks.
        dtype: dtype of the operands.
        hardware: "a100", "h100", "h200", "b200", "cpu", or a `Hardware`.
        gathered_dtype: dtype in which an array is all-gathered, if it is not `dtype`,
            as with `wire_dtype="fp8"`.

    Returns:
        The times of the call and of its parts, in seconds.

    Raises:
        UnknownNameError: if the op, the method or the hardware is not known.
        ShapeContractError: if a size is less than 1.
    """
    if op not in prediction.OPS:
        raise UnknownNameError(
            f"simulate: op {shown(op)} is not known. {nearest(op, prediction.OPS)}"
        )
    if min(M, K, N, P) < 1:
        raise ShapeContractError(
            f"simulate: {op} of M = {M}, K = {K}, N = {N} on P = {P} ranks. Give sizes "
            "of at least 1."
        )
    if not isinstance(method, MethodChoice):
        method = MethodChoice(methods.resolve("simulate", method, None))
    if isinstance(hardware, str) and hardware in HARDWARE:
        hardware = HARDWARE[hardware]
    if not isinstance(hardware, Hardware):
        raise UnknownNameError(
            f"hardware {shown(hardware)} is not known. {nearest(hardware, HARDWARE)}"
        )
    return prediction.estimate(op, method, M, K, N, P, dtype, hardware, gathered_dtype)


def predict(*arguments, **options) -> float:
    """Predicts the seconds of one call; takes the same arguments as `estimate`."""
    return estimate(*arguments, **options).seconds
