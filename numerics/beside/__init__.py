"""Copies of what runs beside the calls of torch: steps of optimizers, and calls of custom functions."""
