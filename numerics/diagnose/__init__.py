"""Name the symptom of two training curves and the next step of the manual (sections 1.3 and 2.3). Needs no torch."""
