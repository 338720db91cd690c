"""Command-line entries, one a command; each is thin."""
