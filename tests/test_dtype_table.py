"""The engine's table of dtypes agrees with the package's and with NumPy's sizes."""

from jax_ub import _cpu
from jax_ub._src import dtypes


def test_the_engine_and_the_package_have_the_same_dtypes():
    numpy_names = {name: row["numpy"] for name, row in _cpu.dtypes().items()}
    assert numpy_names == {row.short_name: row.dtype.name for row in dtypes.TABLE}


def test_sizes_are_numpys():
    for row in dtypes.TABLE:
        size_bytes = _cpu.dtypes()[row.short_name]["size_bytes"]
        assert size_bytes == row.dtype.itemsize
