"""The verdict in experiment trackers, and `make sync`."""
