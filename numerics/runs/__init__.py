"""Tools that take whole runs or devices."""
