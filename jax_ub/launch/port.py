"""The port on which the processes of a job meet."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Finds a free port, and keeps other programs from being given it.

    The coordinator shares its port (SO_REUSEPORT), as this socket does, which does not
    listen: nobody ever connects to it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
