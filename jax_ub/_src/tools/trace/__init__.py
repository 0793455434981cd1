"""Records, merges and writes traces: what every rank does in a call, and when."""
