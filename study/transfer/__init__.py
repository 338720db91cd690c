"""Evaluate trained runs on other platforms."""
