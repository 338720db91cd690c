"""The verdict in experiment trackers."""
