"""The checklist of two machines: pack each one into a zip, compare two zips."""
