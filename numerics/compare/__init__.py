"""Compare two records, section 4.5."""
