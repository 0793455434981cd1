"""Predicts how much overlap would help a model."""
