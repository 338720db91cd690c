"""Why is a step not reproducible? Repeat it and compare hashes (sections 2.3.2.1 and 2.3.2.2)."""
