"""The suites of `make bench`, one module each."""
