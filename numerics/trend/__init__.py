"""Trends of monitored tensors over steps: the first anomaly of each, and where two runs depart."""
