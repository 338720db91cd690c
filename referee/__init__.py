"""Three tools for any trainer: is an attention legal, is it better (verdict), why do two runs differ (numerics)."""
