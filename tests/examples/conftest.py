"""The example's package is found beside its script, as Python finds it for the script."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
