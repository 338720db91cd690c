"""Admit the variants of a study: examine them once, and refuse those that break the contract of an attention."""
