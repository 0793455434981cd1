"""The key-value store of `jax.distributed`. Its keys are private to the job."""

import contextlib
import secrets
from typing import Any

import jax

# jax has no public name for its client, and the service accepts no second client.
from jax._src import distributed  # noqa: TID251

from jax_ub._src.errors import CommunicatorError


class JaxService:
    """The keys of one scope in the key-value store of the job's coordinator."""

    def __init__(self, scope: str):
        """Opens the store.

        Raises:
            CommunicatorError: if `jax.distributed` is not initialized.
        """
        self._client: Any = distributed.global_state.client
        self._prefix = f"jax_ub/{scope}/"
        if self._client is None:
            raise CommunicatorError(
                "initialize_ub: the mesh has devices of several processes, but this "
                "process belongs to no job. Call jax.distributed.initialize() first."
            )

    def write(self, key: str, text: str) -> None:
        """Stores a message, replacing an earlier one of the same key.

        Raises:
            CommunicatorError: if the job's coordinator does not answer.
        """
        try:
            self._client.key_value_set(self._prefix + key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error

    def read(self, key: str) -> str | None:
        """Returns the message of a key, or None if there is none.

        Raises:
            CommunicatorError: if the job's coordinator does not answer.
        """
        try:
            return self._client.key_value_try_get(self._prefix + key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _gone(error) from error

    def erase(self, key: str) -> None:
        """Deletes the message of a key, if there is one."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(self._prefix + key)


def job() -> str:
    """Returns the id of this job: a random number that its processes share.

    Returns "no job" if `jax.distributed` is not initialized.

    Raises:
        CommunicatorError: if the job's coordinator does not answer.
    """
    client: Any = distributed.global_state.client
    if client is None:
        return "no job"
    try:
        # The first process sets the id; the writes of the others fail.
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
