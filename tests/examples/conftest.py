"""Adds the examples' folder to the path, for the package `lm`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
