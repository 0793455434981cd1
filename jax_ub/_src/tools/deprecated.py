"""Functions of the deprecated module `jax_ub.simulate`."""

from jax_ub._src import methods
from jax_ub._src.errors import ShapeContractError, UnknownNameError, nearest, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction import estimate as prediction
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.tools.explain.report import find_hardware


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
    """Predicts the time of one call, as the private `prediction.estimate` does.

    It checks the arguments. `method` and `hardware` may also be names, such as "auto"
    and "h100".

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
    machine = find_hardware(hardware)
    return prediction.estimate(op, method, M, K, N, P, dtype, machine, gathered_dtype)


def predict(*arguments, **options) -> float:
    """Predicts the seconds of one call; takes the same arguments as `estimate`."""
    return estimate(*arguments, **options).seconds
