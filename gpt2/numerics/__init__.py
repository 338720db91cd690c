"""Accuracy debugging in the trainer: what `numerics` needs of a run."""
