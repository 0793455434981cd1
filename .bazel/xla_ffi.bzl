"""XLA's FFI headers as a repository, from the installed jaxlib: nothing is fetched."""

_FIND_JAXLIB = "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"

_BUILD = """load("@rules_cc//cc:cc_library.bzl", "cc_library")

cc_library(
    name = "headers",
    hdrs = glob(["xla/ffi/api/*.h"]),
    includes = ["."],
    visibility = ["//visibility:public"],
)
"""

def _xla_ffi_impl(ctx):
    include_dir = ctx.os.environ.get("JAX_UB_XLA_INCLUDE_DIR", "")
    if not include_dir:
        python = ctx.os.environ.get("PYTHON_BIN_PATH", "python3")
        found = ctx.execute([python, "-c", _FIND_JAXLIB])
        if found.return_code:
            fail("%s has no jaxlib: set PYTHON_BIN_PATH to an interpreter that has, or JAX_UB_XLA_INCLUDE_DIR\n%s" % (python, found.stderr))
        include_dir = found.stdout.strip() + "/include"
    ctx.symlink(include_dir + "/xla", "xla")
    ctx.file("BUILD", _BUILD)

xla_ffi_repository = repository_rule(
    implementation = _xla_ffi_impl,
    environ = [
        "JAX_UB_XLA_INCLUDE_DIR",
        "PYTHON_BIN_PATH",
    ],
    local = True,
)
