"""Per-process state: settings, engines, named overlaps and connections to peers."""
