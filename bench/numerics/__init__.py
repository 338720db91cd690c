"""Injected faults and clean pairs that judge `python -m numerics compare`."""
