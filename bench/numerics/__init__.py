"""Measurements of numerics."""
