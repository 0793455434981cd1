"""A key-value store that is replicated by MPI messages, through mpi4py."""

import functools
import importlib
import time
import types

import jax

from jax_ub._src.errors import CommunicatorError, ConfigurationError

# A tag that other users of COMM_WORLD are unlikely to use. MPI guarantees tags up to
# 32767.
_TAG = 21250
# MPI transfers long messages only while sender and receiver both call MPI. A sender
# keeps calling it for this long; receivers poll at least this often.
_LONGEST_SEND_S = 0.2


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


class Mailbox:
    """This process's copy of the messages of all scopes.

    It holds all scopes, since messages of a later scope may arrive while an earlier one
    is read.
    """

    def __init__(self, world):
        """Creates an empty mailbox on mpi4py's COMM_WORLD."""
        self.notes: dict[tuple[str, str], str] = {}  # messages by scope and key
        self._world = world
        self._sent: list = []

    def device_groups(self) -> tuple[int, int]:
        """Returns this process's MPI rank and the number of ranks."""
        return self._world.Get_rank(), self._world.Get_size()

    def put(self, note: tuple[str, str], text: str | None) -> None:
        """Stores a message here and at all other ranks, or deletes it if it is None."""
        self._keep(note, text)
        own, size = self.device_groups()
        for rank in range(size):
            if rank != own:
                request = self._world.isend((note, text), dest=rank, tag=_TAG)
                self._sent.append(request)
        end_s = time.monotonic() + _LONGEST_SEND_S
        while self._is_sending() and time.monotonic() < end_s:
            self.receive()

    def receive(self) -> None:
        """Receives and stores all messages that have arrived."""
        while self._world.iprobe(tag=_TAG):
            self._keep(*self._world.recv(tag=_TAG))

    def _keep(self, note, text):
        if text is None:
            self.notes.pop(note, None)
        else:
            self.notes[note] = text

    def _is_sending(self):
        self._sent = [request for request in self._sent if not request.test()[0]]
        return bool(self._sent)


@functools.cache
def mailbox() -> Mailbox:
    """Returns the only mailbox of this process."""
    return Mailbox(load_mpi().COMM_WORLD)


class Mpi:
    """A key-value store of which every process has a copy, updated by MPI messages."""

    def __init__(self, scope: str):
        """Opens the store.

        Raises:
            CommunicatorError: if MPI's ranks differ from jax's process indices.
        """
        self._scope = scope
        self._mailbox = mailbox()
        mine = self._mailbox.device_groups()
        if mine != (jax.process_index(), jax.process_count()):
            raise CommunicatorError(
                f"initialize_ub: this is rank {mine[0]} of {mine[1]} in MPI, but "
                f"process {jax.process_index()} of {jax.process_count()} in jax. Call "
                "jax.distributed.initialize() with MPI's numbers, or leave "
                "bootstrap_backend out."
            )

    def write(self, key: str, text: str) -> None:
        """Stores a message at all processes."""
        self._mailbox.put((self._scope, key), text)

    def read(self, key: str) -> str | None:
        """Returns the message of a key, or None if none has arrived."""
        self._mailbox.receive()
        return self._mailbox.notes.get((self._scope, key))

    def erase(self, key: str) -> None:
        """Deletes the message of a key at all processes."""
        self._mailbox.put((self._scope, key), None)
