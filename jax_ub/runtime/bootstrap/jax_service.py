"""Notes in the key-value store of `jax.distributed`: its keys are the job's own."""

import contextlib
import secrets
from typing import Any

import jax

# jax hands its client to nobody under a public name, and a second one may not connect.
from jax._src import distributed  # noqa: TID251

from jax_ub.errors import CommunicatorError


class JaxService:
    """A store in the store that the coordinator of the job keeps."""

    def __init__(self, scope: str):
        """Opens it.

        Raises:
            CommunicatorError: if this process belongs to no job.
        """
        self._client: Any = distributed.global_state.client
        self._prefix = f"jax_ub/{scope}/"
        if self._client is None:
            raise CommunicatorError(
                "initialize_ub: the mesh has devices of several processes, but this "
                "process belongs to no job. Call jax.distributed.initialize() first."
            )

    def write(self, key: str, text: str) -> None:
        """Leaves a note.

        Raises:
            CommunicatorError: if the coordinator of the job does not answer.
        """
        try:
            self._client.key_value_set(self._prefix + key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error

    def read(self, key: str) -> str | None:
        """Returns a note, or None.

        Raises:
            CommunicatorError: if the coordinator of the job does not answer.
        """
        try:
            return self._client.key_value_try_get(self._prefix + key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _gone(error) from error

    def erase(self, key: str) -> None:
        """Takes a note away."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(self._prefix + key)


def job() -> str:
    """Returns what only the processes of this job have in common.

    Raises:
        CommunicatorError: if the coordinator of the job does not answer.
    """
    client: Any = distributed.global_state.client
    if client is None:
        return "no job"
    try:
        # Who comes first, draws.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set("jax_ub/job", secrets.token_hex(8))
        return client.key_value_try_get("jax_ub/job")
    except jax.errors.JaxRuntimeError as error:
        raise _gone(error) from error


def _gone(error):
    return CommunicatorError(
        "initialize_ub: the coordinator of jax.distributed, which keeps the notes of "
        f"all processes, does not answer: {error}. Process 0 runs it: see why it ended."
    )
