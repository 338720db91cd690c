"""Examine an attention variant before it trains: causality, batches, modes, repeatability, gradients, shapes."""
