"""How often the check against float64 calls a correct operation wrong."""
