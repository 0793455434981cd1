"""The native rule under its name in rules_cc."""

cc_binary = native.cc_binary
