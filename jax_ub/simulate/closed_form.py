"""The formulas that the replay of a schedule comes to when nothing is quantised."""


def all_gather_matmul_s(
    num_ranks: int, chunk_gemm_s: float, chunk_wire_s: float, first_put_s: float
) -> float:
    """AG+GEMM in a ring, the own chunk first.

    Nothing is exposed where a chunk's wire time and the begin of the first put are
    within the time of its GEMM; where the wire is slower, the first puts are.
    """
    p, g, c = num_ranks, chunk_gemm_s, chunk_wire_s
    return max(p * g, first_put_s + c + (p - 1) * g, first_put_s + (p - 1) * c + g)


def matmul_reduce_scatter_s(
    num_ranks: int,
    chunk_gemm_s: float,
    chunk_wire_s: float,
    handshake_s: float,
    sum_s: float,
) -> float:
    """GEMM+RS, the own chunk last: each part is put when it is done."""
    p, g, c = num_ranks, chunk_gemm_s, chunk_wire_s
    computed = p * g
    arrived = max((p - 1) * g + c, g + (p - 1) * c) + handshake_s
    return max(computed, arrived) + sum_s


def one_shot_s(
    num_ranks: int, gemm_s: float, wire_s: float, handshake_s: float, sum_s: float
) -> float:
    """GEMM+AR in one exchange: everything to each peer, and added up there.

    `wire_s` and `sum_s` are of all rows.
    """
    return gemm_s + (num_ranks - 1) * wire_s + handshake_s + sum_s
