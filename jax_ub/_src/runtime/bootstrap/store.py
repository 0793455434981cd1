"""Key-value stores through which processes exchange messages, one class per backend."""

from typing import Protocol

from jax_ub._src.errors import ConfigurationError, UnknownNameError, nearest, shown
from jax_ub._src.runtime import settings
from jax_ub._src.runtime.bootstrap.directory import Directory
from jax_ub._src.runtime.bootstrap.jax_service import JaxService, job
from jax_ub._src.runtime.bootstrap.mpi import Mpi, load_mpi

JAX = "jax"
_BACKENDS = (JAX, "mpi", "file")


class KeyValueStore(Protocol):
    """A store of text messages by key, shared by all processes."""

    def write(self, key: str, text: str) -> None:
        """Stores a message, replacing an earlier one of the same key."""

    def read(self, key: str) -> str | None:
        """Returns the message of a key, or None if there is none yet."""

    def erase(self, key: str) -> None:
        """Deletes the message of a key, if there is one."""


def check_backend(backend: str | None) -> None:
    """Checks that a `bootstrap_backend` is known and usable in this process.

    Raises:
        UnknownNameError: if the backend is unknown.
        ConfigurationError: if "file" has no directory, or mpi4py is not installed.
    """
    name, directory = _split(backend)
    if name not in _BACKENDS or (name != "file" and ":" in str(backend)):
        raise UnknownNameError(
            f"initialize_ub: bootstrap_backend = {shown(backend)} is not one. "
            f"{nearest(name, _BACKENDS)} None is jax: the service of "
            "jax.distributed.initialize(). Leave it out where Transformer Engine had "
            '"nccl" or "gloo".'
        )
    if name == "file" and not directory:
        raise ConfigurationError(
            'initialize_ub: bootstrap_backend = "file" needs a directory that all '
            'processes share: "file:/shared/directory", or JAX_UB_BOOTSTRAP_DIR.'
        )
    if name == "mpi":
        load_mpi()


def open_board(backend: str | None, scope: str) -> KeyValueStore:
    """Opens the key-value store of a backend. Call `check_backend` first.

    Args:
        backend: None or "jax", "mpi", "file" or "file:<directory>".
        scope: namespace of the keys. Stores of different scopes share no messages.

    Raises:
        CommunicatorError: if this process cannot use the backend's store.
    """
    name, directory = _split(backend)
    if name == "file":
        # Concurrent jobs may use the same directory.
        return Directory(directory, f"{job()}-{scope}")
    return Mpi(scope) if name == "mpi" else JaxService(scope)


def backend_name(backend: str | None) -> str:
    """Returns "jax", "mpi" or "file". Invalid backends count as "jax"."""
    name, _ = _split(backend)
    return name if name in _BACKENDS else JAX


def _split(backend):
    if backend is None:
        return JAX, ""
    text = backend if isinstance(backend, str) else ""  # invalid: matches no backend
    name, _, directory = text.partition(":")
    return name, directory or settings.bootstrap_dir() or ""
