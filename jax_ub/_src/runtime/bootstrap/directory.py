"""A key-value store of files in a directory that all processes share."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from jax_ub._src.errors import CommunicatorError, shown


class Directory:
    """A key-value store with one file per key.

    Files that an earlier job left behind do no harm: the scope contains the job's id.
    """

    def __init__(self, directory: str, scope: str):
        """Opens the directory, and creates it if it does not exist.

        Raises:
            CommunicatorError: if it cannot be created or is not writable.
        """
        self._folder = pathlib.Path(directory)
        self._scope = scope
        with self._named():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass  # fails now, not at the first write, if it is not writable

    def write(self, key: str, text: str) -> None:
        """Stores a message atomically.

        Raises:
            CommunicatorError: if the directory is full or not writable.
        """
        with self._named():
            descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=".")
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(text)
                os.replace(draft, self._path(key))
            finally:
                pathlib.Path(draft).unlink(missing_ok=True)

    def read(self, key: str) -> str | None:
        """Returns the message of a key, or None if there is none.

        Raises:
            CommunicatorError: if the file is not readable, for example because it
                belongs to another user.
        """
        with self._named(), contextlib.suppress(FileNotFoundError):
            return self._path(key).read_text()
        return None

    def erase(self, key: str) -> None:
        """Deletes the message of a key, if there is one."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CommunicatorError(
                f"initialize_ub: the directory of bootstrap_backend, "
                f"{shown(str(self._folder))}, cannot be used: {error.strerror}. Name "
                "one that all processes may write to."
            ) from error

    def _path(self, key):
        return self._folder / _file_name(f"jax_ub-{self._scope}-{key}")


def _file_name(text):
    return "".join(c if c.isalnum() or c in "._-" else f"={ord(c):x}" for c in text)
