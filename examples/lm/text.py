"""The text that every machine has: the source of Python's own standard library."""

import dataclasses
import pathlib
import sysconfig

import numpy as np

# Packages that were installed beside the library, and its tests, are not the library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files to validate with."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def entropy(self) -> float:
        """The entropy of the byte frequencies of `train`, in nats.

        No model that looks at one byte at a time has a lower loss than this.
        """
        counts = np.bincount(self.train, minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def read_standard_library(validation_every: int = 20) -> Text:
    """Reads the standard library, in the order of its paths, split by file.

    Args:
        validation_every: of so many files one is kept for validation.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    ]
    sources = [path.read_bytes() for path in files]
    train = [s for i, s in enumerate(sources) if (i + 1) % validation_every]
    validation = sources[validation_every - 1 :: validation_every]
    return Text(
        train=np.frombuffer(b"".join(train), np.uint8),
        validation=np.frombuffer(b"".join(validation), np.uint8),
    )


def batch(
    text: np.ndarray, shape: tuple[int, ...], seed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts random windows out of `text`.

    The windows depend on `seed` alone, not on the mesh: a run that is resumed, or that
    runs on another number of devices, sees the same bytes.

    Args:
        text: [bytes].
        shape: [..., sequence length] of the batch.
        seed: for training (the run's seed, step).

    Returns:
        inputs and targets, both int32 of `shape`; targets are one byte ahead.
    """
    *leading, length = shape
    starts = np.random.default_rng(seed).integers(len(text) - length, size=leading)
    windows = text[starts[..., None] + np.arange(length + 1)].astype(np.int32)
    return windows[..., :-1], windows[..., 1:]
