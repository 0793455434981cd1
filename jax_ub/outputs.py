"""Where commands write: refused before they run, not after."""

import argparse
import pathlib


def output_path(text: str) -> pathlib.Path:
    """Reads an option that names a file to be written.

    Raises:
        argparse.ArgumentTypeError: if it is a folder, or its folder does not exist.
    """
    path = pathlib.Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(path.parent)!r} for {path.name!r}. Make it first."
        )
    return path
