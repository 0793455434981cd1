"""The native rule under its name in rules_cc."""

cc_library = native.cc_library
