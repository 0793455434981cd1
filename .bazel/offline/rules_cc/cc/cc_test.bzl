"""The native rule under its name in rules_cc."""

cc_test = native.cc_test
