"""`make admit`."""
