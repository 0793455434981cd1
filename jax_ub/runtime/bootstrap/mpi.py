"""Notes as messages of MPI, through mpi4py."""

import importlib
import types

import jax

from jax_ub.errors import CommunicatorError, ConfigurationError

# Any number that others are unlikely to use; MPI promises tags up to 32767.
_TAG = 21250


def load_mpi() -> types.ModuleType:
    """Imports `mpi4py.MPI`, which starts MPI.

    Raises:
        ConfigurationError: if mpi4py is not installed.
    """
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise ConfigurationError(
            'initialize_ub: bootstrap_backend = "mpi", but mpi4py cannot be imported '
            f"({error}). Install it (pip install mpi4py), or leave bootstrap_backend "
            "out: jax.distributed.initialize() works under mpirun too."
        ) from error


class Mpi:
    """A board of which every process has a copy, kept by messages."""

    def __init__(self, scope: str):
        """Opens it.

        Raises:
            CommunicatorError: if MPI's ranks are not the processes of jax.
        """
        self._scope = scope
        self._world = load_mpi().COMM_WORLD
        self._notes: dict[str, str] = {}
        self._sent: list = []
        mine = (self._world.Get_rank(), self._world.Get_size())
        if mine != (jax.process_index(), jax.process_count()):
            raise CommunicatorError(
                f"initialize_ub: this is rank {mine[0]} of {mine[1]} in MPI, but "
                f"process {jax.process_index()} of {jax.process_count()} in jax. Call "
                "jax.distributed.initialize() with MPI's numbers, or leave "
                "bootstrap_backend out."
            )

    def write(self, key: str, text: str) -> None:
        """Leaves a note."""
        self._notes[key] = text
        self._send((self._scope, key, text))

    def read(self, key: str) -> str | None:
        """Returns a note, or None."""
        while self._world.iprobe(tag=_TAG):
            scope, name, text = self._world.recv(tag=_TAG)
            if scope == self._scope:
                self._notes[name] = text
        return self._notes.get(key)

    def erase(self, key: str) -> None:
        """Takes the own copy of a note away."""
        self._notes.pop(key, None)

    def _send(self, note):
        self._sent = [request for request in self._sent if not request.test()[0]]
        for rank in range(self._world.Get_size()):
            if rank != self._world.Get_rank():
                self._sent.append(self._world.isend(note, dest=rank, tag=_TAG))
