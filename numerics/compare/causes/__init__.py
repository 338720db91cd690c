"""Name the cause of a divergence."""
