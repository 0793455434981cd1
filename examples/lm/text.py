"""Training text that is available everywhere: Python's standard library."""

import dataclasses
import pathlib
import sysconfig

import numpy as np

# Not part of the standard library, or only its tests.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}
_VALIDATION_EVERY = 20  # one in this many files is kept for validation


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes for training, and bytes of other files for validation."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def entropy(self) -> float:
        """Returns the entropy of the byte frequencies of `train`, in nats.

        A model that ignores the context cannot have a lower loss.
        """
        counts = np.bincount(self.train, minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def read_standard_library() -> Text:
    """Reads the standard library, sorted by path, and splits it by file."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    ]
    sources = [path.read_bytes() for path in files]
    train = [s for i, s in enumerate(sources) if (i + 1) % _VALIDATION_EVERY]
    validation = sources[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    return Text(
        train=np.frombuffer(b"".join(train), np.uint8),
        validation=np.frombuffer(b"".join(validation), np.uint8),
    )


def batch(
    text: np.ndarray, shape: tuple[int, ...], seed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts random windows out of `text`.

    The windows depend only on `seed`, not on the mesh. A resumed run, or a run with
    another number of devices, gets the same bytes.

    Args:
        text: bytes, a one-dimensional array.
        shape: shape of the batch, [..., sequence length].
        seed: seed of the batch; in training (seed of the run, step).

    Returns:
        Inputs and targets, int32 of `shape`; targets are shifted by one byte.
    """
    *leading, length = shape
    starts = np.random.default_rng(seed).integers(len(text) - length, size=leading)
    windows = text[starts[..., None] + np.arange(length + 1)].astype(np.int32)
    return windows[..., :-1], windows[..., 1:]
