"""Join calls of one record that the other record has as one call."""
