"""The hierarchical view: the tree of modules of one record or of two compared records, one HTML page (section 4.4)."""
