"""Custom variants, one file each: see ra/variants.py."""
