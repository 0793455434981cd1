"""Notes as files in a directory that the processes share."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from jax_ub.errors import CommunicatorError, shown


class Directory:
    """A store of files; what a dead job left there is never taken for an answer."""

    def __init__(self, directory: str, scope: str):
        """Opens the directory, and makes it where it is missing.

        Raises:
            CommunicatorError: if it cannot be made, or nothing be written there.
        """
        self._folder = pathlib.Path(directory)
        self._scope = scope
        with self._named():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass  # so that a process that may not write here says so at once

    def write(self, key: str, text: str) -> None:
        """Leaves a note: whole, or not at all.

        Raises:
            CommunicatorError: if the directory is full, or may not be written to.
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
        """Returns a note, or None.

        Raises:
            CommunicatorError: if it may not be read, as if it is another user's.
        """
        with self._named(), contextlib.suppress(FileNotFoundError):
            return self._path(key).read_text()
        return None

    def erase(self, key: str) -> None:
        """Takes a note away."""
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
