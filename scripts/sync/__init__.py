"""Send a study to its trackers."""
