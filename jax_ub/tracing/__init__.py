"""Records, merges and draws the time of every step on every rank."""
