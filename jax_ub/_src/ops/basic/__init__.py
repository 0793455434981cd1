"""Basic operations, the functions of an activation that fusions combine."""
