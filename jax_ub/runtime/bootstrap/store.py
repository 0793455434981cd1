"""Where processes leave notes for each other; one class for every bootstrap backend."""

from typing import Protocol

from jax_ub.errors import ConfigurationError, UnknownNameError, nearest, shown
from jax_ub.runtime import settings
from jax_ub.runtime.bootstrap.directory import Directory
from jax_ub.runtime.bootstrap.jax_service import JaxService, job
from jax_ub.runtime.bootstrap.mpi import Mpi, load_mpi

JAX = "jax"
_BACKENDS = (JAX, "mpi", "file")


class KeyValueStore(Protocol):
    """Notes by key. A later note of the same key takes the place of the first."""

    def write(self, key: str, text: str) -> None:
        """Leaves a note."""

    def read(self, key: str) -> str | None:
        """Returns a note, or None where there is none (yet)."""

    def erase(self, key: str) -> None:
        """Takes a note away; one that is not there is nothing to do."""


def check_backend(backend: str | None) -> None:
    """Refuses a `bootstrap_backend` that cannot be used here.

    Raises:
        UnknownNameError: if there is none of that name.
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
    """Opens the store of a backend that `check_backend` has let pass.

    Args:
        backend: None or "jax", "mpi", "file" or "file:<directory>".
        scope: what the notes are about: boards of other scopes do not see them.

    Raises:
        CommunicatorError: if the backend does not connect this process.
    """
    name, directory = _split(backend)
    if name == "file":
        # Jobs that run at once may have the same directory.
        return Directory(directory, f"{job()}-{scope}")
    return Mpi(scope) if name == "mpi" else JaxService(scope)


def backend_name(backend: str | None) -> str:
    """Returns "jax", "mpi" or "file"; "jax" for what is none."""
    name, _ = _split(backend)
    return name if name in _BACKENDS else JAX


def _split(backend):
    if backend is None:
        return JAX, ""
    text = backend if isinstance(backend, str) else ""  # of another type: no backend
    name, _, directory = text.partition(":")
    return name, directory or settings.bootstrap_dir() or ""
