"""msProbe's monitor: its interface and its configuration file."""
