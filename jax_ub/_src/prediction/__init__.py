"""Predicts the time of calls on any machine, by simulating the engine's schedules."""
