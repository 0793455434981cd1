import sys

import pytest

from jax_ub._src.tools import options
from jax_ub.errors import UnsupportedOverlapError


@pytest.mark.parametrize("package", ["matplotlib", "psutil"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnsupportedOverlapError,
        match=rf"bench: --plot requires {package}, .* pip install 'jax_ub\[bench\]'",
    ):
        options.load_extra(package, "bench: --plot")
