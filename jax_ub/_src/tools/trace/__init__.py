"""Records, merges and draws traces: the time of every step of a call on every rank."""
