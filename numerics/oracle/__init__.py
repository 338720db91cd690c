"""Check each operation of a step against float64 on the CPU (sections 2.4.1 and 4.2)."""
