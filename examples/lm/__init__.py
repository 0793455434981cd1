"""Modules of train_lm.py: text, model, training step, timing, checkpoints, plot."""
