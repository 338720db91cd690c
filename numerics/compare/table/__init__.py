"""The table of a comparison: the calls of both records, matched and measured."""
