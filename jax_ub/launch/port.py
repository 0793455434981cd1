"""The port on which the processes of a job meet."""

import contextlib
import socket
from collections.abc import Iterator

from jax_ub.launch.environment import HOST, LaunchError


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Finds a free port, and keeps other programs from being given it.

    The coordinator shares its port (SO_REUSEPORT), as this socket does, which does not
    listen: nobody ever connects to it.

    Raises:
        LaunchError: if the processes could not reach each other there.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        _check_route(port)
        yield port


def _check_route(port):
    """Asks the kernel for the way, and sends nothing: JAX would wait for minutes."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((HOST, port))
        except OSError as error:
            raise LaunchError(
                f"launch: {HOST}, where the processes meet, cannot be reached: "
                f"{error.strerror}. Bring the loopback interface up: ip link set lo up."
            ) from error
