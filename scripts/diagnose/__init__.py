"""`make diagnose`."""
