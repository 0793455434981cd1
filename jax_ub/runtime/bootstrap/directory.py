"""Notes as files in a directory that the processes share."""

import os
import pathlib
import tempfile


class Directory:
    """A board of files; what a dead job left there is never taken for an answer."""

    def __init__(self, directory: str, scope: str):
        """Opens the directory, and makes it where it is missing."""
        self._folder = pathlib.Path(directory)
        self._scope = scope
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, key: str, text: str) -> None:
        """Leaves a note: whole, or not at all."""
        descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, self._path(key))

    def read(self, key: str) -> str | None:
        """Returns a note, or None."""
        try:
            return self._path(key).read_text()
        except FileNotFoundError:
            return None

    def erase(self, key: str) -> None:
        """Takes a note away."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key):
        return self._folder / _file_name(f"jax_ub-{self._scope}-{key}")


def _file_name(text):
    return "".join(c if c.isalnum() or c in "._-" else f"={ord(c):x}" for c in text)
