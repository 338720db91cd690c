"""Reduce tensors to the numbers from which their statistics follow, on each kind of device."""
