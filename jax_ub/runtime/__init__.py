"""What a process has once: its settings and its engine."""
