"""The example's package `lm` is found where its script finds it: beside itself."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
