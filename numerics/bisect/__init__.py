"""Search for the smallest set that explains a symptom, by any predicate. Needs no torch (section 2.3.2.5)."""
