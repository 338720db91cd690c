"""`make stress`."""
