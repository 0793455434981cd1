"""Reserves a TCP port for the coordinator of `jax.distributed.initialize()`."""

import contextlib
import socket
from collections.abc import Iterator

from jax_ub._src.tools.launch.environment import HOST, LaunchError


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Yields a free TCP port that no other program can get while the block runs.

    Both the coordinator and this socket set SO_REUSEPORT, so they can bind to the same
    port. This socket does not listen, so it receives no connections.

    Raises:
        LaunchError: if the loopback address cannot be reached.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        _check_route(port)
        yield port


def _check_route(port):
    """Checks that `HOST` can be reached, without sending data to it.

    JAX itself would wait for minutes before it reports an error.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((HOST, port))
        except OSError as error:
            raise LaunchError(
                f"launch: {HOST}, where the processes meet, cannot be reached: "
                f"{error.strerror}. Bring the loopback interface up: ip link set lo up."
            ) from error
