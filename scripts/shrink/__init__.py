"""`make shrink`."""
