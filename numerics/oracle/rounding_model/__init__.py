"""How far rounding moves the results of a correct kernel, and the measure of an error."""
