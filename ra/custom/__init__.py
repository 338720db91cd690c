"""Variants of your own, one file each: see ra/variants.py."""
