"""`make repeat`."""
