"""`make oracle`."""
