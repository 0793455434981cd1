"""`initialize_ub` and `destroy_ub` create and free named overlaps."""
