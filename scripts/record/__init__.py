"""`make record`, and what the commands that replay a run share."""
