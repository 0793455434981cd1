"""The Bzlmod side of xla_ffi.bzl, in a file of its own: Bazel 4 has no extensions."""

load("//.bazel:xla_ffi.bzl", "xla_ffi_repository")

def _xla_ffi_impl(_ctx):
    xla_ffi_repository(name = "xla_ffi")

xla_ffi = module_extension(implementation = _xla_ffi_impl)
