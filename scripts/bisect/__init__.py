"""`make bisect`."""
